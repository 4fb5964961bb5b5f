//! A plan followed by the code that would run it: one step of one rank of every kind, on tensors without
//! memory.
//!
//! The planner counts bytes by formula. The dry run counts what the real code allocates.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use trainyard_plan::framework::Read;
use trainyard_plan::report::{Counted, DryRun, RankBytes};
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

/// What formulas and code count for a strategy, or why the code cannot run it. Fails where there is no code.
/// Without tokens nobody knows where they go: loads of experts are as unequal as `routing_skew` says.
pub(super) fn follow(
    shape: &Shape,
    strategy: &Strategy,
    routing_skew: f64,
) -> Result<Result<DryRun, String>, Failure> {
    // Told before anything else: without it no plan can be followed.
    engine::program()?;
    let world = strategy.degrees.world_size();
    let written = match Framework::Trainyard.write(shape, strategy, world) {
        Ok(written) => written,
        Err(error) => return Ok(Err(error.to_string())),
    };
    // What was written, as it is read: formula and code are to count the same.
    let said = Framework::Trainyard
        .read(&written.text)
        .map_err(Failure::new)?;
    let (Some(shape), strategy) = (&said.shape, &said.strategy) else {
        return Err(Failure::new("the written plan has no model"));
    };
    let mut file = tempfile::NamedTempFile::with_suffix(".toml").map_err(Failure::new)?;
    file.write_all(written.text.as_bytes())
        .map_err(Failure::new)?;
    let mut found = DryRun {
        losses: written.losses.iter().map(ToString::to_string).collect(),
        ranks: Vec::new(),
        routing_skew: shape.experts.as_ref().map(|_| routing_skew),
    };
    let loads = [format!("--debug.routing_skew={routing_skew}")];
    for kind in memory(shape, strategy, &Software::MODERN, &Overheads::none()) {
        let rank = place(&said, shape, &kind) * (world / strategy.degrees.pp);
        match dry_run(file.path(), world, rank, &loads)? {
            Ok(followed) => found.ranks.push(counted(&kind, &followed)),
            Err(why) => return Ok(Err(why)),
        }
    }
    Ok(Ok(found))
}

fn counted(kind: &Memory, followed: &Followed) -> RankBytes {
    RankBytes {
        class: kind.class,
        states: Counted {
            formula: kind.states.parameters + kind.states.optimizer,
            code: (followed.states.parameters + followed.states.optimizer) as f64,
        },
        peak: Counted {
            formula: kind.total(),
            code: followed.peak_bytes as f64,
        },
    }
}

/// The place in the pipeline of the rank that stands for a kind.
fn place(said: &Read, shape: &Shape, kind: &Memory) -> usize {
    let holdings = said.strategy.holdings(shape);
    let found = holdings.iter().find(|holding| holding.class == kind.class);
    found.map_or(0, |holding| holding.rank)
}

/// What a dry run says of a rank of a config, or why it failed.
pub(super) fn dry_run<T: DeserializeOwned>(
    config: &Path,
    world: usize,
    rank: usize,
    overrides: &[String],
) -> Result<Result<T, String>, Failure> {
    let mut arguments: Vec<OsString> = vec!["dry-run".into(), config.into(), "--json".into()];
    arguments.extend(["--world".into(), world.to_string().into()]);
    arguments.extend(["--rank".into(), rank.to_string().into()]);
    arguments.extend(overrides.iter().map(OsString::from));
    Ok(match engine::ask(arguments)? {
        Ok(printed) => Ok(serde_json::from_slice(&printed).map_err(Failure::new)?),
        Err(said) => Err(format!("the dry run of rank {rank} failed: {said}")),
    })
}
