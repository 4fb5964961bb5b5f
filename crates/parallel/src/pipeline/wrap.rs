//! A pipeline over any sequential model in one call.
//!
//! ```no_run
//! # use trainyard_nn::{Builder, SimpleCnn};
//! # use trainyard_parallel::{PipelineOptions, pipeline};
//! # fn train(world: &trainyard_torch::World, images: &tch::Tensor, labels: &tch::Tensor) -> trainyard_parallel::Result<()> {
//! let model = SimpleCnn::build(&Builder::new(1))?;
//! let microbatch = images.narrow(0, 0, images.size()[0] / 8);
//! let options = PipelineOptions { chunks: 8, ..PipelineOptions::default() };
//! let model = pipeline(model, world, &microbatch, options)?;
//! let loss = model.step(images, labels, 0)?; // on the ranks of the last stage
//! # Ok(())
//! # }
//! ```

use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

use tch::{Kind, Tensor};
use trainyard_cost::partition_balanced;
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{Context, Model, Parameter, Unit};
use trainyard_schedule::{ScheduleKind, ShardingPolicy};
use trainyard_torch::{IGNORE_INDEX, World, meta, operators, storage};
use trainyard_trace::Purpose;

use super::execution::Execution;
use super::{ActivationSpec, Pipeline, StageModel};
use crate::ddp::{Ddp, DdpOptions};
use crate::error::{ParallelError, Result};
use crate::strategy::{DataParallelWrapper, Microbatch, StepInputs, Strategy};

/// How a model is cut into stages of similar cost.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// By the floating-point operations of each unit, as libtorch runs it.
    #[default]
    Flops,
    /// By the time that each unit takes on rank 0.
    Measured,
    /// By the number of parameters of each unit, which is right if memory is the problem.
    Parameters,
}

/// Options of [`pipeline`].
#[derive(Copy, Clone, Debug)]
pub struct PipelineOptions {
    /// Micro-batches of a step.
    pub chunks: usize,
    /// The schedule.
    pub schedule: ScheduleKind,
    /// Stages per rank, for schedules that have several.
    pub stages_per_rank: usize,
    /// How the model is cut.
    pub cut: Cut,
}

impl Default for PipelineOptions {
    fn default() -> Self {
        PipelineOptions {
            chunks: 4,
            schedule: ScheduleKind::OneForwardOneBackward,
            stages_per_rank: 1,
            cut: Cut::default(),
        }
    }
}

/// Cuts `model` into stages over the ranks of `pp`, and replicates each stage over the data-parallel ranks. All ranks must
/// pass the same weights; a rank keeps only those of its stages. `microbatch` has the shape and type of the inputs of a
/// micro-batch: a forward pass with it finds the activations between stages, and the cost of units.
pub fn pipeline<M: Model + 'static>(
    model: M,
    world: &World,
    microbatch: &Tensor,
    options: PipelineOptions,
) -> Result<Pipeline> {
    let group = world.group(Axis::Pp)?;
    let stages_per_rank = options.schedule.num_chunks();
    let stages_per_rank = stages_per_rank.unwrap_or(options.stages_per_rank);
    let schedule = options
        .schedule
        .build(group.size(), options.chunks, stages_per_rank)?;
    check_units(&model)?;
    model
        .parameters()
        .iter()
        .try_for_each(Parameter::materialize)?;
    let (outputs, costs) = probe(&model, microbatch, options.cut, world)?;
    let splits = partition_balanced(&costs, schedule.num_stages())?;
    let num_samples = microbatch.size().first().copied().unwrap_or(1) as u64;
    let boundaries = splits[..splits.len() - 1].iter();
    let activations = boundaries.map(|units| -> Result<ActivationSpec> {
        let output = &outputs[units.end - 1];
        Ok(ActivationSpec {
            size: output.size(),
            like: meta::new_empty(output, &[0])?,
            num_tokens: num_samples,
            num_shards: 1,
        })
    });
    let activations = activations.collect::<Result<_>>()?;

    let model: Rc<dyn Model> = Rc::new(model);
    let own = schedule.stages_of(group.index());
    let own: Vec<Range<usize>> = own.into_iter().map(|stage| splits[stage].clone()).collect();
    release_others(&*model, &own)?;
    let replicas = AxisSet::of([Axis::DpReplicate, Axis::DpShard, Axis::Cp]);
    let replicas = world.group(replicas)?;
    let stages = own.into_iter().map(|units| {
        let stage = StageModel::new(Rc::clone(&model), units);
        let stage = Ddp::new(stage, &replicas, DdpOptions::default())?;
        Ok(Box::new(stage) as Box<dyn DataParallelWrapper>)
    });
    let stages = stages.collect::<Result<Vec<_>>>()?;
    Pipeline::new(
        schedule,
        stages,
        &group,
        activations,
        ShardingPolicy::default(),
    )
}

impl Pipeline {
    /// Runs forward and backward of a batch, in micro-batches of equal size. Returns the mean loss over `targets` on the
    /// ranks of the last stage.
    pub fn step(&self, inputs: &Tensor, targets: &Tensor, step: u64) -> Result<Option<Tensor>> {
        let chunks = self.schedule.num_microbatches as i64;
        let num_samples = inputs.size().first().copied().unwrap_or(0);
        if num_samples == 0 || num_samples % chunks != 0 {
            return Err(ParallelError::IndivisibleChunks {
                num_samples,
                chunks,
            });
        }
        let (inputs, parts) = (inputs.f_chunk(chunks, 0)?, targets.f_chunk(chunks, 0)?);
        self.check_microbatch(num_samples / chunks)?;
        let count = num_targets(targets)?;
        let cx = Context::training(step).with_loss_weight(1.0 / count);
        self.run_step(&self.inputs_of(&inputs, &parts, &cx, count))
    }

    /// The outputs for `inputs` in evaluation, on the ranks of the last stage. Their number must be divisible by that of a
    /// micro-batch, whose shape the stages expect.
    pub fn predict(&self, inputs: &Tensor) -> Result<Option<Tensor>> {
        let num_samples = inputs.size().first().copied().unwrap_or(0);
        let of_microbatch = self.activations.first().map(|spec| spec.num_tokens as i64);
        let of_microbatch = of_microbatch.unwrap_or(num_samples).max(1);
        if num_samples == 0 || num_samples % of_microbatch != 0 {
            return Err(ParallelError::IndivisibleChunks {
                num_samples,
                chunks: num_samples.div_euclid(of_microbatch).max(1),
            });
        }
        let parts = inputs.f_split(of_microbatch, 0)?;
        // Nothing is compared with targets.
        let step = self.inputs_of(&parts, &parts, &Context::evaluation(0), 1.0);
        let outputs = Execution::new(self, &step).predict()?;
        Ok(match &outputs[..] {
            [] => None,
            outputs => Some(Tensor::f_cat(outputs, 0)?),
        })
    }

    /// Stages receive into tensors of the shape that they were built for.
    fn check_microbatch(&self, num_samples: i64) -> Result<()> {
        match self.activations.first() {
            Some(spec) if spec.num_tokens as i64 != num_samples => {
                Err(ParallelError::OtherMicrobatch {
                    num_samples,
                    expected: spec.num_tokens as i64,
                })
            }
            _ => Ok(()),
        }
    }

    /// The inputs of a step with one micro-batch per part.
    fn inputs_of<'a>(
        &'a self,
        inputs: &'a [Tensor],
        targets: &'a [Tensor],
        cx: &Context,
        count: f64,
    ) -> StepInputs<'a> {
        let mut first_sample = 0;
        let mut microbatches = Vec::new();
        for (inputs, targets) in inputs.iter().zip(targets) {
            microbatches.push(Microbatch {
                inputs,
                targets,
                cx: cx.clone().at_sample(first_sample),
            });
            first_sample += inputs.size().first().copied().unwrap_or(0) as u64;
        }
        StepInputs {
            microbatches,
            count,
            scale: 1.0,
            is_guarded: false,
            ledger: self.group.ledger(),
        }
    }
}

/// Rejects what needs more than one rank's stage: parameters that two units share, and experts.
fn check_units(model: &dyn Model) -> Result<()> {
    let is_tied = |unit: &&&dyn Unit| !unit.tied_parameters().is_empty();
    let has_experts = |unit: &&&dyn Unit| unit.parameters().iter().any(|p| p.layout().is_expert());
    let units = model.units();
    let reject = |unit: &dyn Unit, what| {
        let unit = unit.name().to_owned();
        Err(ParallelError::NotPipelined { unit, what })
    };
    match (units.iter().find(is_tied), units.iter().find(has_experts)) {
        (Some(unit), _) => reject(*unit, "shares parameters with another unit"),
        (_, Some(unit)) => reject(*unit, "has experts on other ranks"),
        (None, None) => Ok(()),
    }
}

/// The targets that count.
fn num_targets(targets: &Tensor) -> Result<f64> {
    if targets.is_floating_point() {
        return Ok(targets.numel() as f64);
    }
    let is_counted = targets.f_ne(IGNORE_INDEX)?;
    Ok(is_counted.f_sum(Kind::Int64)?.f_int64_value(&[])? as f64)
}

fn forward(unit: &dyn Unit, x: &Tensor) -> Result<Tensor> {
    Ok(tch::no_grad(|| unit.forward(x, &Context::evaluation(0)))?)
}

/// The output of every unit, and its cost, which is the same on all ranks.
fn probe(
    model: &dyn Model,
    x: &Tensor,
    cut: Cut,
    world: &World,
) -> Result<(Vec<Tensor>, Vec<f64>)> {
    let (mut outputs, mut costs) = (Vec::new(), Vec::new());
    for unit in model.units() {
        let x = outputs.last().unwrap_or(x);
        let (output, cost) = match cut {
            Cut::Parameters => (forward(unit, x)?, unit.num_parameters() as f64),
            Cut::Flops => {
                let (output, operators) = operators::record(|| forward(unit, x))?;
                let flops: u64 = operators.iter().map(|operator| operator.flops).sum();
                (output?, flops as f64)
            }
            Cut::Measured => measured(unit, x)?,
        };
        outputs.push(output);
        costs.push(cost);
    }
    if cut == Cut::Measured {
        let shared = Tensor::f_from_slice(&costs)?.f_to_kind(Kind::Double)?;
        let all = world.world_group()?;
        all.broadcast(&shared, 0, Purpose::Control)?.wait()?;
        costs = Vec::try_from(&shared)?;
    }
    Ok((outputs, costs))
}

/// The output of a unit and its time in seconds, the shortest of several.
fn measured(unit: &dyn Unit, x: &Tensor) -> Result<(Tensor, f64)> {
    const NUM_RUNS: usize = 3;
    let mut best = (forward(unit, x)?, f64::MAX);
    for _ in 0..NUM_RUNS {
        let began = Instant::now();
        let output = forward(unit, x)?;
        // On a GPU, reading a value waits for the unit.
        let _ = output
            .f_flatten(0, -1)?
            .f_narrow(0, 0, 1)?
            .f_double_value(&[0])?;
        best = (output, best.1.min(began.elapsed().as_secs_f64()));
    }
    Ok(best)
}

/// Frees the parameters that no unit of this rank uses.
fn release_others(model: &dyn Model, own: &[Range<usize>]) -> Result<()> {
    let mut used: Vec<Parameter> = Vec::new();
    let units = model.units();
    for unit in own.iter().flat_map(|own| &units[own.clone()]) {
        used.extend(unit.parameters());
        used.extend(unit.tied_parameters());
    }
    for parameter in model.parameters() {
        if !used.iter().any(|own| own.is(&parameter)) {
            storage::release(parameter.tensor())?;
        }
    }
    Ok(())
}
