//! The command `trainyard`.
//!
//! It starts in milliseconds, because it does not link libtorch. It passes commands that need tensors to
//! `trainyard-engine`, which is in the same directory.

mod command;
mod engine;
mod failure;
mod libtorch;
mod log;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser};
use trainyard_config::key_for_option;

use crate::command::Command;

/// Trains one model on many nodes.
#[derive(Debug, Parser)]
#[command(
    name = "trainyard",
    version = version(),
    after_help = "Example:\n  \
        trainyard run --standalone --nproc-per-node 2 -- trainyard train configs/llama-tiny.toml"
)]
struct Cli {
    #[command(flatten)]
    color: colorchoice_clap::Color,
    #[command(subcommand)]
    command: Command,
}

/// The version of Trainyard, its commit, and the libtorch that the engine needs.
fn version() -> String {
    let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("TRAINYARD_COMMIT"));
    format!("{version} ({commit}, for libtorch {})", libtorch::VERSION)
}

/// All commands and options.
fn grammar() -> clap::Command {
    Cli::command().mut_subcommand("run", command::with_torchrun_spellings)
}

fn main() -> ExitCode {
    if let Some(code) = trainyard_launcher::worker::intercept() {
        return code;
    }
    trainyard_launcher::broken_pipe::exit_silently();
    let args: Vec<OsString> = std::env::args_os().collect();
    let takes_keys = trainyard_config::takes_keys(&args);
    let (args, overrides) = trainyard_config::split_overrides(args);
    let cli = match parse(args) {
        Ok(cli) => cli,
        Err(error) if takes_keys => suggest_key(error).exit(),
        Err(error) => error.exit(),
    };
    cli.color.write_global();
    match cli.command.execute(&overrides) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("{failure}");
            failure.code()
        }
    }
}

fn parse(args: Vec<OsString>) -> Result<Cli, clap::Error> {
    let is_help = |arg: &OsString| arg == "--help" || arg == "help";
    let mut grammar = grammar();
    if args.iter().any(is_help) {
        grammar = command::with_long_help(grammar);
    }
    let mut matches = grammar.try_get_matches_from_mut(args)?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut grammar))
}

/// Names the config key that an unknown option may mean.
fn suggest_key(mut error: clap::Error) -> clap::Error {
    let key = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(option))) => key_for_option(option),
        _ => None,
    };
    if let Some(key) = key {
        let tip = format!("a config key of a similar name exists: '--{key}'");
        error.insert(
            ContextKind::Suggested,
            ContextValue::StyledStrs(vec![tip.into()]),
        );
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_of_train_lists_the_keys_of_the_config() {
        for line in [
            ["trainyard", "train", "--help"],
            ["trainyard", "help", "train"],
        ] {
            let help = parse(line.map(OsString::from).to_vec());
            let help = help.map(|_| ()).unwrap_err().to_string();
            assert!(help.contains("optimizer: name, lr"), "{help}");
        }
    }

    #[test]
    fn the_grammar_is_consistent() {
        grammar().debug_assert();
    }

    #[test]
    fn an_option_without_a_section_gets_its_key() {
        let line = ["trainyard", "train", "a.toml", "--lr", "3"];
        let error = suggest_key(Cli::try_parse_from(line).unwrap_err()).to_string();
        assert!(error.contains("'--optimizer.lr'"), "{error}");
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
