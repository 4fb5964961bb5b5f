//! From a config to the stages of a pipeline.

use std::collections::HashSet;
use std::ops::Range;
use std::rc::Rc;

use trainyard_config::{Config, Offload, PipelineReduce, ReshardAfterForward};
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{Context, Model, Parameter, Place, Router, Unit};
use trainyard_parallel::{Part, Pipeline, RecomputePlan, Shape, Strategy, Tie, balanced};
use trainyard_schedule::{Reductions, Schedule, Sharing};
use trainyard_torch::{World, meta};
use trainyard_trace::Ledger;

use crate::build;
use crate::error::{Result, TrainError};
use crate::trainer::data_axes;

/// This rank's stages, each wrapped as its degrees ask, under the config's schedule.
pub fn pipeline(
    config: &Config,
    world: &World,
    place: Place,
    plan: &RecomputePlan,
) -> Result<Box<dyn Strategy>> {
    let group = world.group(Axis::Pp)?;
    let schedule = schedule(config, world)?;
    // The whole model without memory: where to cut it, and what crosses the cuts.
    let fake = World::fake(
        world.mesh().clone(),
        world.rank(),
        Ledger::new(world.rank()),
    )?;
    let outline = build::model_with(config, &fake, build::builder(config, &fake, Place::Meta)?)?;
    let cuts = cuts(config, &*outline, schedule.num_stages())?;
    let shapes = shapes(config, world, &*outline, &cuts, place)?;

    let own = schedule.stages_of(group.index());
    let own: Vec<Range<usize>> = own.into_iter().map(|stage| cuts[stage].clone()).collect();
    let builder = build::builder(config, world, place)?.only(names(&*outline, &own));
    let model: Rc<dyn Model> = build::model_with(config, world, builder)?.into();
    let tie = tie(&*model, &schedule, group.index());
    let copy = tie.as_ref().and_then(Tie::copy).cloned();
    let copies: Vec<Parameter> = copy.into_iter().collect();
    let num_units = model.units().len();
    let stages = own.into_iter().map(|units| {
        let mut part = Part::new(Rc::clone(&model), units.clone());
        if units.end == num_units {
            part = part.with_copies(copies.clone());
        }
        build::strategy(config, Rc::new(part), world, &plan.part(units))
    });
    let stages = stages.collect::<Result<Vec<_>>>()?;
    let pipeline = Pipeline::new(schedule, stages, &group, shapes, sharing(config))?;
    Ok(Box::new(pipeline.tied(tie)))
}

/// When stages are gathered and their gradients reduced.
fn sharing(config: &Config) -> Sharing {
    let section = &config.parallelism;
    let reductions = match section.pipeline_parallel_reduce {
        // Stage 1 holds gradients whole in any case.
        PipelineReduce::Each if section.zero_stage > 1 => Reductions::Each,
        _ => Reductions::Once,
    };
    let gathers = section.data_parallel_shard_degree != 1 && section.zero_stage == 3;
    let stays = reductions == Reductions::Once && section.offload == Offload::None;
    Sharing {
        reductions,
        most_unsharded: match section.fsdp_reshard_after_forward {
            ReshardAfterForward::Default if gathers && stays => Some(2),
            ReshardAfterForward::Never if gathers && stays => Some(usize::MAX),
            _ => None,
        },
    }
}

/// A table that the last unit borrows from the first, where different ranks hold them and this is one
/// of both.
fn tie(model: &dyn Model, schedule: &Schedule, rank: usize) -> Option<Tie> {
    let (first, last) = (*schedule.holders.first()?, *schedule.holders.last()?);
    let borrowed = model.units().last()?.borrowed();
    let table = borrowed.first()?.clone();
    match rank {
        _ if first == last => None,
        rank if rank == first => Some(Tie::new(table, last, true)),
        rank if rank == last => Some(Tie::new(table, first, false)),
        _ => None,
    }
}

fn schedule(config: &Config, world: &World) -> Result<Schedule> {
    let num_ranks = world.mesh().size(Axis::Pp);
    let batching = config.batching(world.mesh().size_of(data_axes()))?;
    let section = &config.parallelism;
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

/// The units of every stage: as the config says, or so that stages cost alike.
fn cuts(config: &Config, model: &dyn Model, num_stages: usize) -> Result<Vec<Range<usize>>> {
    let Some(blocks) = config.parallelism.split_points()? else {
        return Ok(balanced(&costs(config, model)?, num_stages)?);
    };
    // The embedding is the first unit, and blocks come after it.
    let begins = blocks.iter().map(|block| block + 1);
    let ends: Vec<usize> = begins.chain([model.units().len()]).collect();
    let starts = std::iter::once(0).chain(ends.iter().copied());
    Ok(starts.zip(&ends).map(|(start, &end)| start..end).collect())
}

/// What a pass through each unit costs, near enough to share them: multiplications per position.
fn costs(config: &Config, model: &dyn Model) -> Result<Vec<f64>> {
    let attention = match config.model.resolve()?.decoder() {
        Some(sizes) => (sizes.query_width() * config.training.seq_len) as f64,
        None => 0.0,
    };
    let units = model.units();
    let last = units.len().saturating_sub(1);
    let cost = |(index, unit): (usize, &&dyn Unit)| match index {
        // Looking a row up multiplies nothing.
        0 => 0.0,
        index if index == last => borrowed_too(*unit),
        _ => met_by_a_token(*unit) + attention,
    };
    Ok(units.iter().enumerate().map(cost).collect())
}

/// Parameters of a unit that a token meets: some of the experts, and everything else.
fn met_by_a_token(unit: &dyn Unit) -> f64 {
    let share = unit.router().map_or(1.0, Router::chosen_share);
    let met = |p: &Parameter| match p.layout().is_of_experts() {
        true => share * p.num_elements() as f64,
        false => p.num_elements() as f64,
    };
    unit.parameters().iter().map(met).sum()
}

/// Parameters a unit computes with, its own or not.
fn borrowed_too(unit: &dyn Unit) -> f64 {
    let borrowed = unit.borrowed();
    let borrowed: u64 = borrowed.iter().map(|p| p.num_elements()).sum();
    (unit.num_parameters() + borrowed) as f64
}

/// The names of what some units compute with.
fn names(model: &dyn Model, own: &[Range<usize>]) -> HashSet<String> {
    let units = model.units();
    let own = own.iter().flat_map(|range| &units[range.clone()]);
    let mut names = HashSet::new();
    for unit in own {
        unit.visit(&mut |parameter| {
            names.insert(parameter.name().to_owned());
        });
        names.extend(unit.borrowed().iter().map(|p| p.name().to_owned()));
    }
    names
}

/// What crosses each cut, found by a pass without memory.
fn shapes(
    config: &Config,
    world: &World,
    model: &dyn Model,
    cuts: &[Range<usize>],
    place: Place,
) -> Result<Vec<Shape>> {
    let batching = config.batching(world.mesh().size_of(data_axes()))?;
    let cp = build::context_parallel(config, world)?;
    let tokens = [batching.local, config.training.seq_len / cp.size()];
    let mut x = Place::Meta.empty(&tokens, tch::Kind::Int64)?;
    let ends: Vec<usize> = cuts.iter().map(|units| units.end).collect();
    let mut shapes = Vec::new();
    let units = model.units();
    for (index, unit) in units.iter().enumerate() {
        x = tch::no_grad(|| unit.forward(&x, &Context::evaluation(0)))?;
        if index + 1 < units.len() && ends.contains(&(index + 1)) {
            let like = place.empty(&[0], x.kind())?;
            debug_assert!(meta::is_meta(&x));
            shapes.push(Shape {
                size: x.size(),
                like,
                num_tokens: (batching.local * config.training.seq_len) as u64,
                num_sharers: world.mesh().size_of(AxisSet::of([Axis::Cp, Axis::Tp])) as u64,
            });
        }
    }
    Ok(shapes)
}
