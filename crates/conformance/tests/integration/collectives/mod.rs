//! Every collective on real ranks: results in closed form, equal bits on all ranks, and bytes.

mod bytes;
mod exchange;
mod failures;
mod gathers;
mod groups;
mod pattern;
mod reductions;

use trainyard_conformance::Suite;

/// The suites of this module.
pub const SUITES: &[Suite] = &[
    Suite {
        name: "collectives::reductions",
        sizes: &[2, 3],
        full_sizes: &[4],
        cases: reductions::CASES,
        also_over_network: true,
    },
    Suite {
        name: "collectives::gathers_and_exchanges",
        sizes: &[2, 3],
        full_sizes: &[4],
        cases: exchange::CASES_WITH_GATHERS,
        also_over_network: true,
    },
    Suite {
        name: "collectives::bytes",
        sizes: &[2],
        full_sizes: &[3, 4],
        cases: bytes::CASES,
        also_over_network: true,
    },
    Suite {
        name: "collectives::failures",
        sizes: &[2, 3],
        full_sizes: &[4],
        cases: failures::CASES,
        also_over_network: true,
    },
    Suite {
        name: "collectives::groups_of_a_mesh",
        sizes: &[4],
        full_sizes: &[],
        cases: groups::CASES,
        also_over_network: false,
    },
];
