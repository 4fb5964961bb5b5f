//! The commands that need libtorch, and the worker process of a training job.
//!
//! [`main`] is the whole program, for the components of a [`Registry`]: `trainyard-engine` is this program with the
//! built-in ones, and a user's program is the same with more. Users do not call `trainyard-engine`: `trainyard` executes
//! it with the same arguments. It is a separate program so that the launcher, which runs on every node during the whole
//! job, does not load libtorch.

mod child;
mod command;
mod configs;
mod error;
mod matmuls;
mod measure;
mod ranks;
mod served;
mod verify;

use std::ffi::OsString;
use std::process::ExitCode;
use std::rc::Rc;

use clap::Parser;
use trainyard_train::Registry;

use crate::command::Command;
use crate::configs::Configs;

/// Train, dry-run, verify and benchmark models
///
/// `PROGRAM CONFIG.toml` is short for `PROGRAM train CONFIG.toml`.
#[derive(Debug, Parser)]
#[command(name = "trainyard", version)]
struct Cli {
    #[command(flatten)]
    color: colorchoice_clap::Color,
    #[command(subcommand)]
    command: Command,
}

/// Runs the command of the arguments of this process, and returns its exit code.
pub fn main(registry: Registry) -> ExitCode {
    if let Some(code) = trainyard_launcher::worker::intercept() {
        return code;
    }
    trainyard_launcher::broken_pipe::exit_silently();
    trainyard_torch::uncaught::report();
    trainyard_torch::memory::use_huge_pages();
    trainyard_torch::memory::keep_freed();
    let args = with_command(std::env::args_os().collect());
    let (args, overrides) = trainyard_config::split_overrides(args);
    let Cli { color, command } = Cli::parse_from(args);
    color.write_global();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(trainyard_launcher::color::on_stderr())
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env()
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .init();
    let configs = Configs {
        overrides,
        registry: Rc::new(registry),
    };
    match command.execute(&configs) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            error.exit_code()
        }
    }
}

/// Inserts `train` before an argument that is a config file instead of a command.
fn with_command(mut args: Vec<OsString>) -> Vec<OsString> {
    let is_config = |arg: &OsString| arg.to_string_lossy().ends_with(".toml");
    if args.get(1).is_some_and(is_config) {
        args.insert(1, "train".into());
    }
    args
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn a_config_alone_is_trained() {
        let with = |args: &[&str]| {
            let args = args.iter().map(OsString::from).collect();
            with_command(args).join(OsStr::new(" "))
        };
        assert_eq!(with(&["mine", "a.toml"]), "mine train a.toml");
        assert_eq!(with(&["mine", "verify", "a.toml"]), "mine verify a.toml");
        assert_eq!(with(&["mine"]), "mine");
    }
}
