//! Every collective on real ranks: results in closed form, the same bits on all ranks, and bytes.

mod bytes;
mod exchange;
mod failures;
mod gathers;
mod groups;
mod pattern;
mod reductions;

use std::process::ExitCode;

use trainyard_conformance::Suite;

const SIZES: &[usize] = &[2, 3, 4];

fn main() -> ExitCode {
    trainyard_conformance::main(&[
        Suite {
            name: "reductions",
            sizes: SIZES,
            cases: reductions::CASES,
        },
        Suite {
            name: "gathers_and_exchanges",
            sizes: SIZES,
            cases: exchange::CASES_WITH_GATHERS,
        },
        Suite {
            name: "bytes",
            sizes: SIZES,
            cases: bytes::CASES,
        },
        Suite {
            name: "failures",
            sizes: SIZES,
            cases: failures::CASES,
        },
        Suite {
            name: "groups_of_a_mesh",
            sizes: &[4],
            cases: groups::CASES,
        },
    ])
}
