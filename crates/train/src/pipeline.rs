//! Builds the pipeline stages of a rank from a config.

use std::collections::HashSet;
use std::ops::Range;
use std::rc::Rc;

use trainyard_config::{Offload, PipelineReduce, ReshardAfterForward};
use trainyard_cost::partition_balanced;
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{Context, Device, Model, Parameter, Unit};
use trainyard_parallel::{
    ActivationSpec, Pipeline, RecomputePlan, StageModel, Strategy, TiedEmbedding,
};
use trainyard_schedule::{Costs, GradReduction, Schedule, ShardingPolicy, simulate};
use trainyard_torch::{World, meta};
use trainyard_trace::Ledger;

use crate::build;
use crate::error::{Result, TrainError};
use crate::sample_layout::SampleLayout;
use crate::train_spec::TrainSpec;
use crate::trainer::data_axes;

/// The pipeline stages of this rank, each wrapped in its data-parallel strategy, with the schedule of the
/// config.
pub fn pipeline(
    spec: &TrainSpec,
    world: &World,
    device: Device,
    plan: &RecomputePlan,
) -> Result<Box<dyn Strategy>> {
    let group = world.group(Axis::Pp)?;
    let schedule = schedule(spec, world)?;
    // The full model on the meta device: where to split it, and which activations cross the split points.
    let fake = World::fake(
        world.mesh().clone(),
        world.rank(),
        Ledger::new(world.rank()),
    )?;
    let outline = build::model_with(spec, &fake, build::builder(spec, &fake, Device::Meta)?)?;
    let splits = splits(spec, &*outline, schedule.num_stages())?;
    let shapes = shapes(spec, world, &*outline, &splits, device)?;

    let own = schedule.stages_of(group.index());
    let own: Vec<Range<usize>> = own.into_iter().map(|stage| splits[stage].clone()).collect();
    let builder = build::builder(spec, world, device)?.only(names(&*outline, &own));
    let model: Rc<dyn Model> = build::model_with(spec, world, builder)?.into();
    let tied_embedding = tied_embedding(&*model, &schedule, group.index());
    let replica = tied_embedding
        .as_ref()
        .and_then(TiedEmbedding::replica)
        .cloned();
    let replicas: Vec<Parameter> = replica.into_iter().collect();
    let num_units = model.units().len();
    let stages = own.into_iter().map(|units| {
        let mut stage = StageModel::new(Rc::clone(&model), units.clone());
        if units.end == num_units {
            stage = stage.with_tied_parameters(replicas.clone());
        }
        build::strategy(spec, Rc::new(stage), world, &plan.slice(units))
    });
    let stages = stages.collect::<Result<Vec<_>>>()?;
    let pipeline = Pipeline::new(schedule, stages, &group, shapes, sharding_policy(spec))?;
    Ok(Box::new(pipeline.with_tied_embedding(tied_embedding)))
}

/// When the parameters of stages are all-gathered and their gradients reduced.
fn sharding_policy(spec: &TrainSpec) -> ShardingPolicy {
    let section = &spec.parallelism;
    let grad_reduction = match section.pipeline_parallel_reduce {
        // ZeRO stage 1 keeps unsharded gradients in any case.
        PipelineReduce::Each if section.zero_stage > 1 => GradReduction::EveryBackward,
        _ => GradReduction::Once,
    };
    let gathers = section.data_parallel_shard_degree != 1 && section.zero_stage == 3;
    let stays = grad_reduction == GradReduction::Once && section.offload == Offload::None;
    ShardingPolicy {
        grad_reduction,
        max_unsharded: match section.fsdp_reshard_after_forward {
            ReshardAfterForward::Default if gathers && stays => Some(2),
            ReshardAfterForward::Never if gathers && stays => Some(usize::MAX),
            _ => None,
        },
    }
}

/// The tied embedding that the first and the last stage share, if they are on different ranks and this rank
/// has one of them.
fn tied_embedding(model: &dyn Model, schedule: &Schedule, rank: usize) -> Option<TiedEmbedding> {
    let (first, last) = (
        *schedule.stage_to_rank.first()?,
        *schedule.stage_to_rank.last()?,
    );
    let tied = model.units().last()?.tied_parameters();
    let table = tied.first()?.clone();
    match rank {
        _ if first == last => None,
        rank if rank == first => Some(TiedEmbedding::new(table, last, true)),
        rank if rank == last => Some(TiedEmbedding::new(table, first, false)),
        _ => None,
    }
}

fn schedule(spec: &TrainSpec, world: &World) -> Result<Schedule> {
    let num_ranks = world.mesh().size(Axis::Pp);
    let batching = spec.batching(world.mesh().size_of(data_axes()))?;
    let section = &spec.parallelism;
    let failed = |error: trainyard_schedule::ScheduleError| TrainError::Schedule(error.to_string());
    let schedule = match &section.pipeline_parallel_schedule_csv {
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(TrainError::io(path))?;
            Schedule::from_csv(&text).map_err(failed)?
        }
        None => {
            let kind = section.schedule_kind()?;
            let chunks = kind
                .num_chunks()
                .unwrap_or(section.pipeline_parallel_stages_per_rank);
            let schedule = kind.build(num_ranks, batching.num_microbatches, chunks);
            schedule.map_err(failed)?
        }
    };
    schedule.check().map_err(failed)?;
    Ok(schedule)
}

/// A warning if a pipeline has so few micro-batches that its ranks idle for much of a step.
pub fn bubble_warning(spec: &TrainSpec, world: &World) -> Result<Option<String>> {
    let num_ranks = world.mesh().size(Axis::Pp);
    if num_ranks == 1 {
        return Ok(None);
    }
    let schedule = schedule(spec, world)?;
    let num_microbatches = schedule.num_microbatches;
    if num_microbatches >= 2 * num_ranks {
        return Ok(None);
    }
    // Backward for inputs and for weights take as long as forward, each.
    let timeline = simulate(&schedule, &Costs::uniform(1.0, 1.0, 1.0));
    let timeline = timeline.map_err(|error| TrainError::Schedule(error.to_string()))?;
    let idle = 100.0 * timeline.bubble() / timeline.end();
    if idle < 1.0 {
        return Ok(None);
    }
    let batching = spec.batching(world.mesh().size_of(data_axes()))?;
    let enough = 2 * num_ranks * batching.local * batching.ranks;
    Ok(Some(format!(
        "{num_microbatches} micro-batches on {num_ranks} pipeline ranks leave a rank idle for {idle:.0} % of the step: use \
         at least {}, with training.global_batch_size = {enough} or a smaller training.local_batch_size",
        2 * num_ranks
    )))
}

/// The units of every stage: split at the points of the config, or balanced by cost.
fn splits(spec: &TrainSpec, model: &dyn Model, num_stages: usize) -> Result<Vec<Range<usize>>> {
    let Some(blocks) = spec.parallelism.split_points()? else {
        return Ok(partition_balanced(&costs(spec, model)?, num_stages)?);
    };
    let begins = blocks.iter().map(|&block| unit_of_block(model, block));
    let begins = begins.collect::<Result<Vec<_>>>()?;
    let ends: Vec<usize> = begins.into_iter().chain([model.units().len()]).collect();
    if ends.len() != num_stages || !ends.is_sorted() {
        return Err(TrainError::Schedule(format!(
            "parallelism.pipeline_parallel_split_points must name the first blocks of {} stages, in order",
            num_stages - 1
        )));
    }
    let starts = std::iter::once(0).chain(ends.iter().copied());
    Ok(starts.zip(&ends).map(|(start, &end)| start..end).collect())
}

/// The unit with the name of a block, such as `layers.2`.
fn unit_of_block(model: &dyn Model, block: usize) -> Result<usize> {
    let units = model.units();
    let is_block = |unit: &&dyn Unit| {
        let number = unit.name().rsplit('.').next();
        number.and_then(|number| number.parse().ok()) == Some(block)
    };
    units.iter().position(is_block).ok_or_else(|| {
        let names: Vec<&str> = units.iter().map(|unit| unit.name()).collect();
        TrainError::Schedule(format!(
            "parallelism.pipeline_parallel_split_points names block {block}, but the units of the model are {}",
            names.join(", ")
        ))
    })
}

/// The approximate cost of each unit, in multiplications per token.
fn costs(spec: &TrainSpec, model: &dyn Model) -> Result<Vec<f64>> {
    let model_spec = spec.model.resolve()?;
    Ok(match model_spec.decoder() {
        Some(shape) => shape.unit_costs(spec.training.seq_len),
        None => model.units().into_iter().map(used_parameters).collect(),
    })
}

/// Parameters that a unit computes with, its own and tied ones.
fn used_parameters(unit: &dyn Unit) -> f64 {
    let tied = unit.tied_parameters();
    let tied: u64 = tied.iter().map(|p| p.num_elements()).sum();
    (unit.num_parameters() + tied) as f64
}

/// The names of all parameters that these units compute with.
fn names(model: &dyn Model, own: &[Range<usize>]) -> HashSet<String> {
    let units = model.units();
    let own = own.iter().flat_map(|range| &units[range.clone()]);
    let mut names = HashSet::new();
    for unit in own {
        unit.visit(&mut |parameter| {
            names.insert(parameter.name().to_owned());
        });
        names.extend(unit.tied_parameters().iter().map(|p| p.name().to_owned()));
    }
    names
}

/// The activations that cross each split point, found by a forward pass on the meta device.
fn shapes(
    spec: &TrainSpec,
    world: &World,
    model: &dyn Model,
    splits: &[Range<usize>],
    device: Device,
) -> Result<Vec<ActivationSpec>> {
    let batching = spec.batching(world.mesh().size_of(data_axes()))?;
    let cp = build::context_parallel(spec, world)?;
    let (sample, kind) = SampleLayout::of(spec)?.inputs;
    let mut shape = [vec![batching.local], sample].concat();
    if let Some(positions) = shape.get_mut(1) {
        *positions /= cp.size();
    }
    let mut x = Device::Meta.empty(&shape, kind)?;
    let ends: Vec<usize> = splits.iter().map(|units| units.end).collect();
    let mut shapes = Vec::new();
    let units = model.units();
    for (index, unit) in units.iter().enumerate() {
        x = tch::no_grad(|| unit.forward(&x, &Context::evaluation(0)))?;
        if index + 1 < units.len() && ends.contains(&(index + 1)) {
            let like = device.empty(&[0], x.kind())?;
            debug_assert!(meta::is_meta(&x));
            shapes.push(ActivationSpec {
                size: x.size(),
                like,
                num_tokens: (batching.local * spec.training.seq_len) as u64,
                num_shards: world.mesh().size_of(AxisSet::of([Axis::Cp, Axis::Tp])) as u64,
            });
        }
    }
    Ok(shapes)
}
