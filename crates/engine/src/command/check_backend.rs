//! `check-backend`: whether messages can be carried that way here.

use std::process::ExitCode;

use crate::error::Result;

/// Arguments of `check-backend`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// `gloo` or `nccl`.
    #[arg(value_parser = ["gloo", "nccl"])]
    backend: String,
}

/// Fails with the reason where the backend cannot be used.
pub fn execute(arguments: Arguments) -> Result<ExitCode> {
    if arguments.backend == "nccl" {
        trainyard_torch::require_gpu(0)?;
    }
    println!("{} can be used here", arguments.backend);
    Ok(ExitCode::SUCCESS)
}
