//! `trainyard dry-run`: peak memory, FLOPs and communication of a step, without running it.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;
use trainyard_config::Config;
use trainyard_train::dry_run::{AllocatorPeak, DryRun, dry_run};
use trainyard_train::parameter_server::{self, ServedDryRun};

use super::allocator::{self, Allocator};
use super::fitting_gpus::fitting_gpus;
use crate::configs::Configs;
use crate::error::Result;
use crate::served::workers;

/// Simulate one rank on meta tensors: peak memory, FLOPs and communication of a step
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Path of the config file (TOML)
    config: PathBuf,
    /// World size: the number of ranks of the job
    #[arg(long)]
    world: usize,
    /// The rank to simulate
    #[arg(long, default_value_t = 0)]
    rank: usize,
    /// Simulate a parameter server and a worker; the ranks are workers
    #[arg(long, conflicts_with_all = ["rank", "allocator"])]
    servers: Option<usize>,
    /// The ranks of a worker
    #[arg(long, default_value = "1", requires = "servers")]
    nproc_per_worker: NonZero<usize>,
    /// Also measure the memory of CUDA's caching allocator
    #[arg(long, value_delimiter = ',', value_name = "SETTINGS")]
    allocator: Vec<Allocator>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Include every operator call
    #[arg(long, requires = "json")]
    operators: bool,
}

/// The results of a dry run, for machines.
#[derive(Serialize)]
struct Results<'a> {
    #[serde(flatten)]
    counted: &'a DryRun,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    allocators: BTreeMap<String, AllocatorPeak>,
}

/// Simulates one step and prints the results.
pub fn execute(arguments: Arguments, configs: &Configs) -> Result<ExitCode> {
    let spec = configs.load(&arguments.config)?;
    if let Some(num_servers) = arguments.servers {
        let workers = workers(arguments.world, arguments.nproc_per_worker)?;
        let mut found = parameter_server::dry_run(&spec, num_servers, workers)?;
        found.worker.operators.clear();
        found.server.operators.clear();
        print_served(&found, &spec, arguments.json);
        return Ok(ExitCode::SUCCESS);
    }
    let mut found = dry_run(&spec, arguments.world, arguments.rank)?;
    if !arguments.operators {
        found.operators.clear();
    }
    let job = (arguments.config.as_path(), arguments.world, arguments.rank);
    let peaks = allocator::measure(&arguments.allocator, job, &configs.overrides)?;
    if arguments.json {
        let results = Results {
            counted: &found,
            allocators: peaks
                .iter()
                .map(|(a, peak)| (a.to_string(), *peak))
                .collect(),
        };
        println!(
            "{}",
            serde_json::to_string_pretty(&results).unwrap_or_default()
        )
    } else {
        print!("{}{}", table(&found), allocator_table(&peaks))
    }
    Ok(ExitCode::SUCCESS)
}

fn print_served(found: &ServedDryRun, config: &Config, is_json: bool) {
    if is_json {
        let found = serde_json::to_string_pretty(found).unwrap_or_default();
        println!("{found}");
        return;
    }
    let worker = if config.has_local_updates() {
        format!(
            "a worker, in one step; it exchanges parameters after every {} of them",
            config.local_updates.sync_steps
        )
    } else {
        "a worker, for one piece of a step".to_owned()
    };
    println!("{worker}:\n{}", table(&found.worker));
    println!("a server, in one step:\n{}", table(&found.server));
}

fn table(found: &DryRun) -> String {
    let mut out = format!(
        "rank {} of {} ({})\n\nparameters  {}\nflops       {:.4e} per step\npeak        {}\n",
        found.rank,
        found.world_size,
        found.mesh,
        grouped(found.num_parameters),
        found.flops as f64,
        readable(found.peak_bytes),
    );
    for (kind, bytes) in found.bytes_by_kind.iter().filter(|(_, bytes)| **bytes > 0) {
        let share = 100.0 * *bytes as f64 / found.peak_bytes.max(1) as f64;
        out += &format!("  {kind:<14} {:>12}  {share:5.1} %\n", readable(*bytes));
    }
    let (states, formula) = (found.states.total(), found.states_by_formula.total());
    out += &format!(
        "states      {} between steps ({})\n",
        readable(states),
        if states == formula {
            "equal to the formula".to_owned()
        } else {
            format!("{states} bytes, formula: {formula}")
        }
    );
    out += &format!("fits        {}\n", fitting_gpus(found.peak_bytes));
    out += &format!(
        "\n{:<16} {:<11} {:>6} {:>14} {:>14}\n",
        "collective", "purpose", "count", "payload", "sent"
    );
    for row in &found.collectives {
        out += &format!(
            "{:<16} {:<11} {:>6} {:>14} {:>14}\n",
            row.kind.to_string(),
            row.purpose.to_string(),
            row.count,
            readable(row.payload_bytes),
            readable(row.sent_bytes),
        );
    }
    out
}

fn allocator_table(peaks: &BTreeMap<Allocator, AllocatorPeak>) -> String {
    if peaks.is_empty() {
        return String::new();
    }
    let mut out = format!(
        "\n{:<16} {:>12} {:>12} {:>12} {:>8}\n",
        "allocator", "startup", "allocated", "reserved", "unused"
    );
    for (allocator, peak) in peaks {
        out += &format!(
            "{allocator:<16} {:>12} {:>12} {:>12} {:>6.1} %\n",
            readable(peak.startup_bytes),
            readable(peak.allocated_bytes),
            readable(peak.reserved_bytes),
            100.0 * peak.unused(),
        );
    }
    out
}

/// Formats bytes with a binary unit.
fn readable(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.2} {}", UNITS[unit]),
    }
}

/// Formats a number with a comma between groups of three digits.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(grouped(70_553_706_496), "70,553,706,496");
        assert_eq!(grouped(12), "12");
        assert_eq!(readable(512), "512 B");
        assert_eq!(readable(3 << 29), "1.50 GiB");
    }
}
