//! Distributed data parallelism on real ranks, compared with one rank.

mod equality;
mod gradients;
mod overlap;
mod shares;
mod threads;
mod unused;

use trainyard_conformance::{Case, Suite};

const AGAINST_ONE_RANK: &[Case] = &[
    Case {
        name: "fp64_equals_one_rank",
        run: equality::fp64,
    },
    Case {
        name: "fp32_equals_one_rank",
        run: equality::fp32,
    },
    Case {
        name: "bf16_compression_halves_the_bytes_and_is_close",
        run: equality::compression,
    },
    Case {
        name: "bf16_layers_are_close",
        run: equality::mixed_precision,
    },
    Case {
        name: "bytes_equal_the_closed_form",
        run: equality::bytes,
    },
    Case {
        name: "all_ranks_begin_with_the_weights_of_rank_0",
        run: gradients::first_weights,
    },
    Case {
        name: "masked_targets_are_weighted_by_tokens",
        run: shares::masked_targets,
    },
    Case {
        name: "batches_of_different_sizes_equal_one_rank",
        run: shares::uneven_batches,
    },
];

const MECHANISM: &[Case] = &[
    Case {
        name: "reductions_begin_before_backward_ends",
        run: overlap::early,
    },
    Case {
        name: "without_overlap_reductions_begin_after_backward",
        run: overlap::late,
    },
    Case {
        name: "gradients_are_views_of_their_bucket",
        run: gradients::views,
    },
    Case {
        name: "accumulated_gradients_stay_in_their_bucket",
        run: gradients::accumulated_views,
    },
    Case {
        name: "unused_parameters_are_named",
        run: unused::named,
    },
    Case {
        name: "a_pass_after_a_rejected_one_is_correct",
        run: unused::after_rejection,
    },
    Case {
        name: "unused_parameters_are_handled_on_request",
        run: unused::handled,
    },
    Case {
        name: "a_parameter_that_is_used_in_some_steps_equals_one_rank",
        run: unused::come_and_go,
    },
];

const IN_ONE_PROCESS: &[Case] = &[
    Case {
        name: "two_threads_equal_one_thread",
        run: threads::equal_one,
    },
    Case {
        name: "an_indivisible_batch_is_rejected",
        run: threads::indivisible,
    },
    Case {
        name: "a_failing_replica_is_named",
        run: threads::broken_replica,
    },
];

/// The suites of this module.
pub const SUITES: &[Suite] = &[
    Suite {
        name: "ddp::against_one_rank",
        sizes: &[2],
        full_sizes: &[3, 4],
        cases: AGAINST_ONE_RANK,
        also_over_network: false,
    },
    Suite {
        name: "ddp::mechanism",
        sizes: &[2],
        full_sizes: &[3, 4],
        cases: MECHANISM,
        also_over_network: false,
    },
    Suite {
        name: "ddp::data_parallel",
        sizes: &[1],
        full_sizes: &[],
        cases: IN_ONE_PROCESS,
        also_over_network: false,
    },
];
