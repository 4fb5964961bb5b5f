//! `check-backend`: whether a communication backend is available on this host.

use std::process::ExitCode;

use crate::error::Result;

/// Check whether a communication backend is available on this host
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The backend
    #[arg(value_parser = ["gloo", "nccl"])]
    backend: String,
}

/// Returns an error with the reason if the backend is not available.
pub fn execute(arguments: Arguments) -> Result<ExitCode> {
    if arguments.backend == "nccl" {
        trainyard_torch::require_gpu(0)?;
    }
    println!("{} is available", arguments.backend);
    Ok(ExitCode::SUCCESS)
}
