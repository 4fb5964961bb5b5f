//! Compressed communication on real ranks.

mod hooks;
mod quantized_sum;
mod sharded;

use trainyard_conformance::{Case, Suite};

/// The suites of this module.
pub const SUITES: &[Suite] = &[
    Suite {
        name: "compression::ddp",
        sizes: &[2],
        full_sizes: &[4],
        cases: &[
            Case {
                name: "sums_are_within_the_bound_and_bytes_equal_the_closed_form",
                run: hooks::sums_and_bytes,
            },
            Case {
                name: "a_dry_run_sends_the_same_bytes",
                run: hooks::dry_runs,
            },
            Case {
                name: "training_converges",
                run: hooks::convergence,
            },
        ],
        also_over_network: false,
    },
    Suite {
        name: "compression::sharded",
        sizes: &[4],
        full_sizes: &[],
        cases: &[
            Case {
                name: "quantized_gradients_are_close_to_one_rank",
                run: sharded::gradients,
            },
            Case {
                name: "quantized_parameters_are_close_to_one_rank",
                run: sharded::parameters,
            },
            Case {
                name: "secondary_shards_equal_one_rank",
                run: sharded::secondary,
            },
        ],
        also_over_network: false,
    },
    Suite {
        name: "compression::quantized_sum",
        sizes: &[2, 3, 8],
        full_sizes: &[4, 5, 6, 7],
        cases: &[Case {
            name: "errors_are_two_roundings",
            run: quantized_sum::two_roundings,
        }],
        also_over_network: false,
    },
];
