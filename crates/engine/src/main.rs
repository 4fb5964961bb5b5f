//! `trainyard-engine`: the commands that need libtorch, and the worker process of a training job.
//!
//! Users do not call it: `trainyard` executes it with the same arguments. It is a separate program so that
//! the launcher, which runs on every node during the whole job, does not load libtorch.

mod command;
mod error;
mod matmuls;
mod measure;
mod ranks;
mod verify;

use std::process::ExitCode;

use clap::Parser;

use crate::command::Command;

/// Train, dry-run, verify and benchmark models. Executed by `trainyard`.
#[derive(Debug, Parser)]
#[command(name = "trainyard", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    if let Some(code) = trainyard_launcher::worker::intercept() {
        return code;
    }
    trainyard_launcher::broken_pipe::exit_silently();
    trainyard_torch::uncaught::report();
    trainyard_torch::memory::use_huge_pages();
    trainyard_torch::memory::keep_freed();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env()
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .init();
    let (args, overrides) = trainyard_config::split_overrides(std::env::args_os());
    match Cli::parse_from(args).command.execute(&overrides) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            error.exit_code()
        }
    }
}
