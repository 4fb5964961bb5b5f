//! Every strategy against one rank and against PyTorch, and the programs as users start them.
//!
//! The test program starts itself again as the ranks of a suite.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod buffers;
mod checkpoints;
mod collectives;
mod compression;
mod convolutions;
mod ddp;
mod elastic;
mod experts;
mod interrupted;
mod join;
mod local_updates;
mod model_parallel;
mod oracle;
mod parameter_server;
mod peer_checkpoint;
mod planned;
mod programs;
mod strategy_matrix;
mod wraps;
mod zero;

use std::process::ExitCode;

fn main() -> ExitCode {
    let suites = [
        collectives::SUITES,
        ddp::SUITES,
        compression::SUITES,
        local_updates::SUITES,
        buffers::SUITES,
        join::SUITES,
        wraps::SUITES,
        zero::SUITES,
        model_parallel::SUITES,
        experts::SUITES,
        checkpoints::SUITES,
    ];
    let trials = [
        oracle::trials(),
        parameter_server::trials(),
        planned::trials(),
        programs::trials(),
        interrupted::trials(),
        peer_checkpoint::trials(),
        elastic::trials(),
        strategy_matrix::trials(),
    ];
    trainyard_conformance::main(&suites.concat(), trials.into_iter().flatten())
}
