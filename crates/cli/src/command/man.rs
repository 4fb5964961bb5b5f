//! `trainyard man`: the manual pages.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::with_long_help;
use crate::failure::Failure;

/// Write manual pages, one per command
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    trainyard man ~/.local/share/man/man1 && man trainyard-run")]
pub struct Man {
    /// The folder to write to; it is created if it does not exist
    folder: PathBuf,
}

impl Man {
    /// Writes the pages.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let failed = |error| Failure::new(format!("{}: {error}", self.folder.display()));
        fs::create_dir_all(&self.folder).map_err(failed)?;
        clap_mangen::generate_to(with_long_help(crate::grammar()), &self.folder).map_err(failed)?;
        Ok(ExitCode::SUCCESS)
    }
}
