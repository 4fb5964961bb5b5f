//! Sharded data parallelism on real ranks, compared with one rank.

mod bytes;
mod equality;
mod memory;
mod offload;
mod precision;
mod recompute;

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
        name: "overlap_and_prefetch_are_bit_identical",
        run: equality::schedules,
    },
    Case {
        name: "merged_units_equal_one_rank",
        run: equality::merged,
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
        name: "recomputation_is_bit_identical",
        run: recompute::same_bits,
    },
    Case {
        name: "a_memory_budget_is_respected",
        run: recompute::budget,
    },
    Case {
        name: "offload_is_bit_identical",
        run: offload::same_bits,
    },
    Case {
        name: "offload_of_optimizer_states_is_bit_identical",
        run: offload::optimizer_states,
    },
    Case {
        name: "float16_skips_the_same_steps_on_every_rank",
        run: precision::float16,
    },
    Case {
        name: "bytes_equal_the_closed_form",
        run: bytes::closed_form,
    },
    Case {
        name: "state_memory_equals_the_closed_form",
        run: memory::states,
    },
    Case {
        name: "communication_allocates_nothing_after_the_first_step",
        run: memory::steady,
    },
];

const HYBRID: &[Case] = &[
    Case {
        name: "hybrid_equals_one_rank",
        run: equality::hybrid,
    },
    Case {
        name: "hybrid_bytes_equal_the_closed_form",
        run: bytes::hybrid,
    },
];

/// The suites of this module.
pub const SUITES: &[Suite] = &[
    Suite {
        name: "zero::against_one_rank",
        sizes: &[2],
        full_sizes: &[3, 4],
        cases: AGAINST_ONE_RANK,
        also_over_network: false,
    },
    Suite {
        name: "zero::hybrid",
        sizes: &[4],
        full_sizes: &[],
        cases: HYBRID,
        also_over_network: false,
    },
];
