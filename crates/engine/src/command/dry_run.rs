//! `trainyard dry-run`: will it fit, and what will it send?

use std::path::PathBuf;
use std::process::ExitCode;

use trainyard_config::Config;
use trainyard_train::dry_run::{DryRun, dry_run};

use crate::error::Result;

/// Arguments of `dry-run`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The config file.
    config: PathBuf,
    /// Number of ranks.
    #[arg(long)]
    world: usize,
    /// The rank to follow.
    #[arg(long, default_value_t = 0)]
    rank: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Follows one step and prints what it found.
pub fn execute(arguments: Arguments, overrides: &[String]) -> Result<ExitCode> {
    let config = Config::load(&arguments.config, overrides)?;
    let found = dry_run(&config, arguments.world, arguments.rank)?;
    match arguments.json {
        true => println!(
            "{}",
            serde_json::to_string_pretty(&found).unwrap_or_default()
        ),
        false => print!("{}", table(&found)),
    }
    Ok(ExitCode::SUCCESS)
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
        match states == formula {
            true => "as the formula says".to_owned(),
            false => format!("{states} bytes, {formula} by formula"),
        }
    );
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

/// Bytes with a unit a person reads.
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

/// Digits in groups of three.
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
