//! Dry runs of plans: one step of one rank of every class, on tensors without memory.
//!
//! The planner estimates memory by formula. The dry run counts what the training code allocates.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;

use clap::Args;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use trainyard_arch::DecoderConfig;
use trainyard_interop::Framework;
use trainyard_interop::ParsedJob;
use trainyard_plan::{Memory, Overheads, PlanRequest, Strategy, memory};
use trainyard_plan_report::{AllocatorBytes, ByteCounts, DryRun, RankBytes};

use crate::command::dry_run::{ALLOCATORS, UNLIMITED, simulated_gpu};
use crate::engine;
use crate::failure::Failure;

/// The caching allocator to measure.
pub(super) struct Allocator {
    /// The name of its settings.
    settings: String,
    /// The memory of its GPU.
    memory_bytes: u64,
}

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
    allocated_bytes: u64,
    reserved_bytes: u64,
}

#[derive(Deserialize)]
struct States {
    parameters: u64,
    optimizer: u64,
}

/// How plans are dry-run.
#[derive(Debug, Args)]
pub(super) struct DryRunOptions {
    /// Also measure what CUDA's caching allocator reserves in the dry runs, on a simulated GPU: `cuda` for its default
    /// settings, `expandable` for expandable_segments:True
    #[arg(long, value_name = "SETTINGS", requires = "dry_run", value_parser = ALLOCATORS)]
    pub allocator: Option<String>,
    /// Skew of the experts' load in a dry run: the load is proportional to 1 / expert number ^ POWER
    #[arg(
        long,
        value_name = "POWER",
        default_value_t = 0.0,
        requires = "dry_run"
    )]
    pub routing_skew: f64,
}

/// Compares the memory of a strategy by formula and by dry run; the inner error says why it cannot run.
///
/// # Errors
/// The engine is not installed, or a temporary file cannot be written.
pub(super) fn dry_run_plan(
    strategy: &Strategy,
    request: &PlanRequest,
    options: &DryRunOptions,
) -> Result<Result<DryRun, String>, Failure> {
    // Fail early: no plan can run without the engine.
    engine::program()?;
    let world = strategy.degrees.world_size();
    let emitted = match Framework::Trainyard.write(&request.shape, strategy, world) {
        Ok(emitted) => emitted,
        Err(error) => return Ok(Err(error.to_string())),
    };
    // Estimate what the config says, so the formula and the code count the same.
    let parsed = Framework::Trainyard
        .read(&emitted.text)
        .map_err(Failure::new)?;
    let mut file = tempfile::NamedTempFile::with_suffix(".toml").map_err(Failure::new)?;
    file.write_all(emitted.text.as_bytes())
        .map_err(Failure::new)?;
    let deviations = emitted.deviations.iter().map(ToString::to_string).collect();
    let run = dry_run_config(file.path(), &parsed, request, options, &[])?;
    Ok(run.map(|run| DryRun { deviations, ..run }))
}

/// Compares the memory of a config of ours by formula and by dry run; the inner error says why it cannot run.
///
/// # Errors
/// The engine is not installed.
pub(super) fn dry_run_config(
    config: &Path,
    parsed: &ParsedJob,
    request: &PlanRequest,
    options: &DryRunOptions,
    overrides: &[String],
) -> Result<Result<DryRun, String>, Failure> {
    let strategy = &parsed.strategy;
    let Some(shape) = &parsed.shape else {
        return Err(Failure::new("the config has no model"));
    };
    let routing_skew = options.routing_skew;
    let mut found = DryRun {
        deviations: Vec::new(),
        ranks: Vec::new(),
        routing_skew: shape.moe.as_ref().map(|_| routing_skew),
    };
    let loads = format!("--debug.routing_skew={routing_skew}");
    let overrides = [overrides, &[loads]].concat();
    let world = strategy.degrees.world_size();
    for class_memory in memory(shape, strategy, &parsed.software, &Overheads::none()) {
        let rank = pipeline_position(parsed, shape, &class_memory) * strategy.degrees.stage_size();
        let on = |memory_bytes| {
            let settings = options.allocator.clone();
            let allocator = settings.map(|settings| Allocator {
                settings,
                memory_bytes,
            });
            dry_run(config, (world, rank), allocator.as_ref(), &overrides)
        };
        // Close to the limit of its GPU, an allocator returns what it does not need. If that is not enough, the question is
        // how much would be.
        let measured = match on(left_for_allocator(request, strategy))? {
            Err(_) if options.allocator.is_some() => on(UNLIMITED)?,
            measured => measured,
        };
        match measured {
            Ok(measured) => found.ranks.push(byte_counts(&class_memory, &measured)),
            Err(why) => return Ok(Err(why)),
        }
    }
    Ok(Ok(found))
}

/// The memory of a GPU that the caching allocator can take.
fn left_for_allocator(request: &PlanRequest, strategy: &Strategy) -> u64 {
    let outside = request.overheads.of(&strategy.degrees, 0.0);
    let capacity = request.cluster.accelerator.memory.value;
    (capacity - outside.context - outside.communicators).max(0.0) as u64
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
        allocator: allocator.map(|memory| AllocatorBytes {
            allocated: memory.allocated_bytes as f64,
            reserved: memory.reserved_bytes as f64,
        }),
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
    allocator: Option<&Allocator>,
    overrides: &[String],
) -> Result<Result<T, String>, Failure> {
    let mut arguments: Vec<OsString> = vec!["dry-run".into(), config.into()];
    arguments.extend(["--json".into(), "--operators".into()]);
    arguments.extend(["--world".into(), world.to_string().into()]);
    arguments.extend(["--rank".into(), rank.to_string().into()]);
    let mut environment = Vec::new();
    if let Some(allocator) = allocator {
        arguments.extend(["--allocator".into(), (&allocator.settings).into()]);
        environment = simulated_gpu(allocator.memory_bytes)?;
    }
    arguments.extend(overrides.iter().map(OsString::from));
    Ok(match engine::ask(environment, arguments)? {
        Ok(printed) => Ok(serde_json::from_slice(&printed).map_err(Failure::new)?),
        Err(error) => Err(format!("the dry run of rank {rank} failed: {error}")),
    })
}
