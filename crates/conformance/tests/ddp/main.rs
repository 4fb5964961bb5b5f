//! Distributed data parallelism on real ranks against the same job on one.

mod equality;
mod gradients;
mod overlap;
mod shares;
mod threads;
mod unused;

use std::process::ExitCode;

use trainyard_conformance::{Case, Suite};

const SIZES: &[usize] = &[2, 3, 4];

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
        name: "bf16_compression_is_close_for_half_the_bytes",
        run: equality::compression,
    },
    Case {
        name: "bf16_layers_are_close",
        run: equality::mixed_precision,
    },
    Case {
        name: "bytes_are_those_of_the_closed_form",
        run: equality::bytes,
    },
    Case {
        name: "every_rank_begins_with_the_first_ones_weights",
        run: gradients::first_weights,
    },
    Case {
        name: "masked_targets_count_where_they_are",
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
        name: "without_overlap_they_begin_after_it",
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
        name: "a_pass_after_a_refused_one_is_right",
        run: unused::after_refusal,
    },
    Case {
        name: "unused_parameters_are_handled_when_asked",
        run: unused::handled,
    },
    Case {
        name: "a_parameter_that_comes_and_goes_equals_one_rank",
        run: unused::come_and_go,
    },
];

const IN_ONE_PROCESS: &[Case] = &[
    Case {
        name: "two_threads_equal_one",
        run: threads::equal_one,
    },
    Case {
        name: "a_batch_that_cannot_be_divided_is_refused",
        run: threads::indivisible,
    },
    Case {
        name: "a_replica_that_cannot_be_built_is_named",
        run: threads::broken_replica,
    },
];

fn main() -> ExitCode {
    trainyard_conformance::main(&[
        Suite {
            name: "against_one_rank",
            sizes: SIZES,
            cases: AGAINST_ONE_RANK,
        },
        Suite {
            name: "mechanism",
            sizes: SIZES,
            cases: MECHANISM,
        },
        Suite {
            name: "data_parallel",
            sizes: &[1],
            cases: IN_ONE_PROCESS,
        },
    ])
}
