//! The command `trainyard`.
//!
//! It starts in milliseconds, because it does not link libtorch. It passes commands that need tensors to
//! `trainyard-engine`, which is in the same directory.

mod command;
mod engine;
mod failure;
mod libtorch;
mod log;

use std::process::ExitCode;

use clap::Parser;

use crate::command::Command;

/// Trains one model on many nodes.
#[derive(Debug, Parser)]
#[command(
    name = "trainyard",
    version,
    after_help = "Example:\n  \
        trainyard run --standalone --nproc-per-node 2 -- trainyard train configs/llama-tiny.toml"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    if let Some(code) = trainyard_launcher::worker::intercept() {
        return code;
    }
    trainyard_launcher::broken_pipe::exit_silently();
    let (args, overrides) = trainyard_config::split_overrides(std::env::args_os());
    match Cli::parse_from(args).command.execute(&overrides) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("{failure}");
            failure.code()
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_an_example() {
        fn check(command: &clap::Command) {
            let name = command.get_name();
            if command.has_subcommands() {
                command.get_subcommands().for_each(check);
            } else {
                let help = command.get_after_help().map(ToString::to_string);
                let help = help.unwrap_or_default();
                assert!(help.contains("trainyard"), "no example in `{name} --help`");
            }
        }
        check(&Cli::command());
    }
}
