//! `trainyard data`: what training reads, made beforehand.

mod prepare;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::failure::Failure;

/// Turn text into tokens, before training
#[derive(Debug, Args)]
pub struct Data {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Prepare(prepare::Prepare),
}

impl Data {
    /// Does it.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        match self.command {
            Command::Prepare(prepare) => prepare.execute(),
        }
    }
}
