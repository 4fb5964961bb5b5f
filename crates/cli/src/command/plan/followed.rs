//! The best plan, followed by the code that would run it: one step of one rank of every kind, on tensors
//! without memory.
//!
//! The planner counts bytes by formula. The dry run counts what the real code allocates. Parameters and the
//! optimiser's states must be the same in both, to the byte; the peak need not be, and both are shown.

use std::io::Write;
use std::process::Command;

use serde::Deserialize;
use trainyard_plan::{Framework, Memory, Overheads, Shape, Software, Strategy, memory};

use crate::engine;
use crate::failure::Failure;

/// What a dry run says of a rank.
#[derive(Deserialize)]
struct Followed {
    peak_bytes: u64,
    states: States,
}

#[derive(Deserialize)]
struct States {
    parameters: u64,
    optimizer: u64,
}

/// Follows a strategy and tells what formulas and code count, a line for every kind of rank.
pub(super) fn follow(shape: &Shape, strategy: &Strategy) -> Result<String, Failure> {
    let world = strategy.degrees.world_size();
    let written = Framework::Trainyard.write(shape, strategy, world);
    let written = written.map_err(Failure::new)?;
    let read = Framework::Trainyard
        .read(&written.text)
        .map_err(Failure::new)?;
    let (Some(shape), strategy) = (read.shape, read.strategy) else {
        return Err(Failure::new("the written plan has no model"));
    };
    let mut file = tempfile::NamedTempFile::with_suffix(".toml").map_err(Failure::new)?;
    file.write_all(written.text.as_bytes())
        .map_err(Failure::new)?;
    let mut lines = format!(
        "\nThe best plan in our own words, {}, by formula and by a dry run of the code (states: parameters and optimiser):\n\
         {:14} {:>17} {:>17} {:>14} {:>14}\n",
        strategy.degrees, "", "states, formula", "states, code", "peak, formula", "peak, code"
    );
    for kind in memory(&shape, &strategy, &Software::MODERN, &Overheads::none()) {
        let rank = place(&shape, &strategy, &kind) * (world / strategy.degrees.pp);
        let followed = run(file.path(), world, rank)?;
        let held = &followed.states;
        let held = held.parameters + held.optimizer;
        let formula = kind.states.parameters + kind.states.optimizer;
        lines.push_str(&format!(
            "{:14} {formula:>17.0} {held:>17} {:>10.2} GiB {:>10.2} GiB\n",
            kind.class.name(),
            gib(kind.total()),
            gib(followed.peak_bytes as f64),
        ));
    }
    Ok(lines)
}

/// The place in the pipeline of the rank that stands for a kind.
fn place(shape: &Shape, strategy: &Strategy, kind: &Memory) -> usize {
    let holdings = strategy.holdings(shape);
    let found = holdings.iter().find(|holding| holding.class == kind.class);
    found.map_or(0, |holding| holding.rank)
}

fn run(config: &std::path::Path, world: usize, rank: usize) -> Result<Followed, Failure> {
    let output = Command::new(engine::program()?)
        .arg("dry-run")
        .arg(config)
        .args([
            "--json",
            "--world",
            &world.to_string(),
            "--rank",
            &rank.to_string(),
        ])
        .output()
        .map_err(Failure::new)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::new(format!("the dry run failed: {}", said.trim())));
    }
    serde_json::from_slice(&output.stdout).map_err(Failure::new)
}

fn gib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 30)
}
