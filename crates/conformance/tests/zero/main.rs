//! Sharded data parallelism on real ranks against the same job on one.

mod bytes;
mod equality;
mod memory;
mod offload;
mod precision;
mod recompute;

use std::process::ExitCode;

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
        name: "bf16_is_close_to_one_rank",
        run: equality::bf16,
    },
    Case {
        name: "overlap_and_prefetch_change_no_bit",
        run: equality::schedules,
    },
    Case {
        name: "tied_embeddings_equal_one_rank",
        run: equality::tied,
    },
    Case {
        name: "evaluation_equals_one_rank",
        run: equality::evaluation,
    },
    Case {
        name: "recomputation_changes_no_bit",
        run: recompute::same_bits,
    },
    Case {
        name: "a_memory_budget_is_kept",
        run: recompute::budget,
    },
    Case {
        name: "offload_changes_no_bit",
        run: offload::same_bits,
    },
    Case {
        name: "float16_skips_the_same_steps_on_every_rank",
        run: precision::float16,
    },
    Case {
        name: "bytes_are_those_of_the_closed_form",
        run: bytes::closed_form,
    },
    Case {
        name: "states_are_those_of_the_closed_form",
        run: memory::states,
    },
    Case {
        name: "after_the_first_step_nothing_is_allocated_for_communication",
        run: memory::steady,
    },
];

const HYBRID: &[Case] = &[
    Case {
        name: "hybrid_equals_one_rank",
        run: equality::hybrid,
    },
    Case {
        name: "hybrid_bytes_are_those_of_the_closed_form",
        run: bytes::hybrid,
    },
];

fn main() -> ExitCode {
    trainyard_conformance::main(&[
        Suite {
            name: "against_one_rank",
            sizes: &[2, 3, 4],
            cases: AGAINST_ONE_RANK,
        },
        Suite {
            name: "hybrid",
            sizes: &[4],
            cases: HYBRID,
        },
    ])
}
