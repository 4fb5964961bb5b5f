//! `trainyard completions`: what a shell needs to complete commands and options.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Args;
use clap_complete::{Shell, generate};

use crate::failure::Failure;

/// Print a script that completes commands and options in a shell
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard completions bash > ~/.local/share/bash-completion/completions/trainyard\n  \
    trainyard completions zsh > ~/.zfunc/_trainyard\n  \
    trainyard completions fish > ~/.config/fish/completions/trainyard.fish")]
pub struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    /// Prints the script.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let mut script = Vec::new();
        generate(self.shell, &mut crate::grammar(), "trainyard", &mut script);
        io::stdout().write_all(&script).map_err(Failure::new)?;
        Ok(ExitCode::SUCCESS)
    }
}
