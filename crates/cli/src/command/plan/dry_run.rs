//! Dry runs of plans: one step of one rank of every class, on tensors without memory.
//!
//! The planner estimates memory by formula. The dry run counts what the training code allocates.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use trainyard_arch::DecoderConfig;
use trainyard_interop::Framework;
use trainyard_interop::ParsedJob;
use trainyard_plan::{Memory, Overheads, Software, Strategy, memory};
use trainyard_plan_report::{ByteCounts, DryRun, RankBytes};

use crate::command::dry_run::simulated_gpu;
use crate::engine;
use crate::failure::Failure;

/// The memory of a rank in a dry run.
#[derive(Deserialize)]
struct DryRunMemory {
    peak_bytes: u64,
    states: States,
    /// By the name of the allocator's settings.
    #[serde(default)]
    allocators: BTreeMap<String, AllocatorMemory>,
}

#[derive(Deserialize)]
struct AllocatorMemory {
    reserved_bytes: u64,
}

#[derive(Deserialize)]
struct States {
    parameters: u64,
    optimizer: u64,
}

/// How plans are dry-run.
pub(super) struct DryRunOptions<'a> {
    /// Without tokens the routing is unknown, so the experts' load follows this skew.
    pub routing_skew: f64,
    /// The settings of CUDA's caching allocator to measure, if any.
    pub allocator: Option<&'a str>,
}

/// Compares the memory of a strategy by formula and by dry run; the inner error says why it cannot run.
///
/// # Errors
/// The engine is not installed, or a temporary file cannot be written.
pub(super) fn dry_run_plan(
    shape: &DecoderConfig,
    strategy: &Strategy,
    options: &DryRunOptions<'_>,
) -> Result<Result<DryRun, String>, Failure> {
    // Fail early: no plan can run without the engine.
    engine::program()?;
    let world = strategy.degrees.world_size();
    let emitted = match Framework::Trainyard.write(shape, strategy, world) {
        Ok(emitted) => emitted,
        Err(error) => return Ok(Err(error.to_string())),
    };
    // Estimate what the config says, so the formula and the code count the same.
    let parsed = Framework::Trainyard
        .read(&emitted.text)
        .map_err(Failure::new)?;
    let (Some(shape), strategy) = (&parsed.shape, &parsed.strategy) else {
        return Err(Failure::new("the emitted config has no model"));
    };
    let mut file = tempfile::NamedTempFile::with_suffix(".toml").map_err(Failure::new)?;
    file.write_all(emitted.text.as_bytes())
        .map_err(Failure::new)?;
    let routing_skew = options.routing_skew;
    let mut found = DryRun {
        deviations: emitted.deviations.iter().map(ToString::to_string).collect(),
        ranks: Vec::new(),
        routing_skew: shape.moe.as_ref().map(|_| routing_skew),
    };
    let loads = [format!("--debug.routing_skew={routing_skew}")];
    for class_memory in memory(shape, strategy, &Software::MODERN, &Overheads::none()) {
        let rank = pipeline_position(&parsed, shape, &class_memory) * strategy.degrees.stage_size();
        match dry_run(file.path(), (world, rank), options.allocator, &loads)? {
            Ok(measured) => found.ranks.push(byte_counts(&class_memory, &measured)),
            Err(why) => return Ok(Err(why)),
        }
    }
    Ok(Ok(found))
}

fn byte_counts(class_memory: &Memory, measured: &DryRunMemory) -> RankBytes {
    let allocator = measured.allocators.values().next();
    RankBytes {
        class: class_memory.class,
        states: ByteCounts {
            formula: class_memory.states.parameters
                + class_memory.states.optimizer
                + class_memory.states.outer,
            dry_run: (measured.states.parameters + measured.states.optimizer) as f64,
        },
        peak: ByteCounts {
            formula: class_memory.total(),
            dry_run: measured.peak_bytes as f64,
        },
        reserved: allocator.map(|memory| memory.reserved_bytes as f64),
    }
}

/// The position in the pipeline of the rank that represents a class.
fn pipeline_position(parsed: &ParsedJob, shape: &DecoderConfig, memory: &Memory) -> usize {
    let layers_by_class = parsed.strategy.layers_by_class(shape);
    let representative = layers_by_class
        .iter()
        .find(|rank_layers| rank_layers.class == memory.class);
    representative.map_or(0, |rank_layers| rank_layers.rank)
}

/// Runs `dry-run --json` of one rank of a world and parses its output; the inner error says why it failed.
pub(super) fn dry_run<T: DeserializeOwned>(
    config: &Path,
    (world, rank): (usize, usize),
    allocator: Option<&str>,
    overrides: &[String],
) -> Result<Result<T, String>, Failure> {
    let mut arguments: Vec<OsString> = vec!["dry-run".into(), config.into()];
    arguments.extend(["--json".into(), "--operators".into()]);
    arguments.extend(["--world".into(), world.to_string().into()]);
    arguments.extend(["--rank".into(), rank.to_string().into()]);
    let mut environment = Vec::new();
    if let Some(settings) = allocator {
        arguments.extend(["--allocator".into(), settings.into()]);
        environment = simulated_gpu()?;
    }
    arguments.extend(overrides.iter().map(OsString::from));
    Ok(match engine::ask(environment, arguments)? {
        Ok(printed) => Ok(serde_json::from_slice(&printed).map_err(Failure::new)?),
        Err(error) => Err(format!("the dry run of rank {rank} failed: {error}")),
    })
}
