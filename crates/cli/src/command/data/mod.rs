//! `trainyard data`: prepares and checks training data.

mod prepare;
mod verify;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::failure::Failure;

/// Prepare and check training data
#[derive(Debug, Args)]
pub struct Data {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Prepare(prepare::Prepare),
    Verify(verify::Verify),
}

impl Data {
    /// Runs the command.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        match self.command {
            Command::Prepare(prepare) => prepare.execute(),
            Command::Verify(verify) => verify.execute(),
        }
    }
}
