//! `trainyard data`: prepares and checks training data.

#[cfg(feature = "prepare")]
mod mnist;
#[cfg(feature = "prepare")]
mod prepare;
mod verify;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};

use crate::failure::Failure;

/// Prepare and check training data
#[derive(Debug, Args)]
pub struct Data {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[cfg(feature = "prepare")]
    Prepare(prepare::Prepare),
    Verify(verify::Verify),
}

impl Data {
    /// Runs the command.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        match self.command {
            #[cfg(feature = "prepare")]
            Command::Prepare(prepare) => prepare.execute(),
            Command::Verify(verify) => verify.execute(),
        }
    }
}

/// The progress of reading this many bytes.
fn progress_bar(num_bytes: u64) -> Result<ProgressBar, Failure> {
    let style = ProgressStyle::with_template(
        "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
    );
    let bar = ProgressBar::new(num_bytes);
    bar.set_style(style.map_err(Failure::new)?);
    Ok(bar)
}
