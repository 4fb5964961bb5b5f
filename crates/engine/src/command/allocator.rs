//! The memory of a dry run as CUDA's caching allocator counts it.
//!
//! An allocator reads its settings once per process, so each of them is measured by a process of its own.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::ValueEnum;
use trainyard_train::dry_run::{AllocatorPeak, allocator_peak};

use crate::child;
use crate::configs::Configs;
use crate::error::{EngineError, Result};

/// Settings of the caching allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Allocator {
    /// The default settings
    Cuda,
    /// With `expandable_segments:True`
    Expandable,
}

impl Allocator {
    /// The value of `PYTORCH_ALLOC_CONF`.
    fn settings(self) -> &'static str {
        match self {
            Allocator::Cuda => "expandable_segments:False",
            Allocator::Expandable => "expandable_segments:True",
        }
    }
}

impl fmt::Display for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Allocator::Cuda => "cuda",
            Allocator::Expandable => "expandable",
        })
    }
}

/// The rank to measure.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    config: PathBuf,
    #[arg(long)]
    world: usize,
    #[arg(long)]
    rank: usize,
}

/// Measures the allocator of this process and prints the result as JSON.
pub fn execute(arguments: Arguments, configs: &Configs) -> Result<ExitCode> {
    let spec = configs.load(&arguments.config)?;
    let peak = allocator_peak(&spec, arguments.world, arguments.rank)?;
    println!("{}", serde_json::to_string(&peak).unwrap_or_default());
    Ok(ExitCode::SUCCESS)
}

/// Measures each of the allocators.
pub fn measure(
    allocators: &[Allocator],
    (config, world, rank): (&Path, usize, usize),
    overrides: &[String],
) -> Result<BTreeMap<Allocator, AllocatorPeak>> {
    let peak_of = |&allocator: &Allocator| {
        let printed = child::ask(|command| {
            command
                .arg("dry-run-allocator")
                .arg(config)
                .args(["--world", &world.to_string(), "--rank", &rank.to_string()])
                .args(overrides)
                .env("PYTORCH_ALLOC_CONF", allocator.settings())
        })?;
        let printed = printed.map_err(|text| {
            EngineError::Rank(format!("cannot measure the allocator {allocator}: {text}"))
        })?;
        let peak = serde_json::from_slice(&printed);
        let peak = peak.map_err(|error| EngineError::Unreadable {
            what: format!("the result of the allocator {allocator}"),
            reason: error.to_string(),
        })?;
        Ok((allocator, peak))
    };
    allocators.iter().map(peak_of).collect()
}
