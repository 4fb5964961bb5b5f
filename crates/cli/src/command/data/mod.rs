//! `trainyard data`: prepares training data.

mod prepare;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::failure::Failure;

/// Prepare training data
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
    /// Runs the command.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        match self.command {
            Command::Prepare(prepare) => prepare.execute(),
        }
    }
}
