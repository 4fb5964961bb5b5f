//! Adapts a strategy to what torchtitan's settings can express.

use trainyard_arch::DecoderConfig;
use trainyard_schedule::ScheduleKind;

use super::super::adapt::Adapted;
use super::super::{Framework, FrameworkError, Setting};
use super::flavors::Flavor;
use super::{PRECISIONS, mixes_types, precision};
use trainyard_plan::{Offload, PipelineLayout, Recompute, Strategy};

/// The nearest strategy that this version can express, and the flavor of the model.
pub(super) fn adapt(
    framework: Framework,
    shape: &DecoderConfig,
    strategy: &Strategy,
) -> Result<(Adapted, &'static Flavor), FrameworkError> {
    let mut adapted = Adapted::new(shape, strategy);
    let flavor = adapt_model(framework, &mut adapted)?;
    adapted.synchronize_in_every_step();
    adapt_offload(framework, &mut adapted);
    adapt_sharding(framework, &mut adapted);
    adapt_precision(framework, &mut adapted);
    if framework == Framework::Torchtitan
        && adapted.strategy.degrees.tp > 1
        && !adapted.strategy.sequence_parallel
    {
        let why = "0.2.2 always combines tensor parallelism with sequence parallelism";
        adapted.change(
            Setting::SequenceParallel,
            why,
            "sequence parallelism",
            |s| {
                s.sequence_parallel = true;
            },
        );
    }
    let is_sparse = adapted.shape.moe.is_some() || adapted.shape.latent.is_some();
    if adapted.strategy.recompute == Recompute::SelectiveOp && is_sparse {
        let why = "the planner models torchtitan's \"selective\" mode for dense blocks only";
        adapted.change(Setting::Recompute, why, "full recomputation", |s| {
            s.recompute = Recompute::Full
        });
    }
    if adapted.strategy.recompute == Recompute::Selective {
        let why = "torchtitan's \"selective\" mode saves attention and recomputes every second matrix product";
        let written = "full recomputation, which saves less and recomputes more";
        adapted.change(Setting::Recompute, why, written, |s| {
            s.recompute = Recompute::Full
        });
    }
    adapt_schedule(framework, &mut adapted)?;
    Ok((adapted, flavor))
}

fn adapt_model(
    framework: Framework,
    adapted: &mut Adapted,
) -> Result<&'static Flavor, FrameworkError> {
    let is_offered = |flavor: &Flavor| match framework {
        Framework::Torchtitan => true,
        _ => flavor.config.is_some_and(|config| !config.is_float8),
    };
    if let Some(flavor) = Flavor::of(&adapted.shape, is_offered) {
        return Ok(flavor);
    }
    let Some(flavor) = Flavor::nearest(&adapted.shape, is_offered) else {
        return Err(framework.unsupported("the model", "no model is registered", "register it"));
    };
    let why = match Flavor::of(&adapted.shape, |flavor| flavor.config.is_some()) {
        Some(_) => "the registered config uses float8 matrix products, which no flag disables",
        None => "torchtitan has no registered config of this shape",
    };
    let written = format!(
        "{} {}; to train your model, register it in Python and change the name",
        flavor.module, flavor.name
    );
    let shape = flavor.shape(adapted.strategy.seq_len);
    let has_experts = shape.moe.is_some();
    adapted.change_model(why, written, shape);
    if adapted.strategy.degrees.ep > 1 && !has_experts {
        let why = "the nearest registered model has no experts";
        adapted.change(Setting::ExpertParallel, why, "no expert parallelism", |s| {
            s.degrees.ep = 1
        });
    }
    Ok(flavor)
}

fn adapt_offload(framework: Framework, adapted: &mut Adapted) {
    if adapted.strategy.offload == Offload::Nvme {
        let why = "torchtitan offloads to host memory only";
        adapted.change(Setting::Offload, why, "enable_cpu_offload", |s| {
            s.offload = Offload::Cpu
        });
    }
    let d = &adapted.strategy.degrees;
    let is_alone = d.dp_shard * d.cp == 1 && adapted.strategy.offload != Offload::None;
    if is_alone && framework == Framework::Torchtitan {
        let why = "0.2.2 offloads only what FSDP shards, and nothing is sharded";
        adapted.change(Setting::Offload, why, "no offloading", |s| {
            s.offload = Offload::None
        });
    }
    if adapted.strategy.offload != Offload::None && adapted.strategy.zero_stage < 2 {
        let why = "torchtitan's offloading needs FSDP, which shards gradients, too";
        adapted.change(Setting::ZeroStage, why, "stage 3", |s| s.zero_stage = 3);
    }
}

fn adapt_sharding(framework: Framework, adapted: &mut Adapted) {
    let s = &adapted.strategy;
    let d = &s.degrees;
    // 0.2.2 rejects replicas (DDP) in combination with any other axis.
    let may_replicate = framework == Framework::TorchtitanCommandLine || d.cp * d.tp * d.pp == 1;
    let is_plain =
        s.zero_stage == 0 && d.cp == 1 && (d.data_parallel() == 1 || (d.ep == 1 && may_replicate));
    if s.zero_stage >= 2 || is_plain {
        return;
    }
    if s.zero_stage == 1 {
        let why = "FSDP shards gradients together with optimizer states";
        adapted.change(
            Setting::ZeroStage,
            why,
            "stage 2, which needs less memory",
            |s| s.zero_stage = 2,
        );
        return;
    }
    let why = if d.cp > 1 {
        "with context parallelism, FSDP always shards over cp"
    } else if d.ep > 1 {
        "expert parallelism needs sharded data-parallel ranks"
    } else {
        "0.2.2 does not combine replicas (DDP) with other axes"
    };
    let written = "stage 2 over all data-parallel ranks, which needs less memory";
    adapted.change(Setting::ZeroStage, why, written, |s| {
        s.degrees.dp_shard *= s.degrees.dp_replicate;
        s.degrees.dp_replicate = 1;
        s.zero_stage = 2;
    });
}

fn adapt_precision(framework: Framework, adapted: &mut Adapted) {
    let offered = PRECISIONS.map(|(precision, ..)| precision);
    adapted.choose_precision(&offered, "torchtitan keeps no second copy of the weights");
    let mixed = precision(2, 4);
    if adapted.strategy.precision == mixed && !mixes_types(framework, &adapted.strategy) {
        let why = "0.2.2 supports mixed precision with TP or PP only if FSDP or CP is enabled";
        adapted.change(Setting::Precision, why, "float32", |s| {
            s.precision = precision(4, 4)
        });
    }
}

fn adapt_schedule(framework: Framework, adapted: &mut Adapted) -> Result<(), FrameworkError> {
    let pp = adapted.strategy.degrees.pp;
    if pp == 1 {
        return Ok(());
    }
    let m = adapted.strategy.num_microbatches();
    let one = |schedule| PipelineLayout {
        schedule,
        stages_per_rank: schedule.num_chunks().unwrap_or(2),
    };
    let to = |adapted: &mut Adapted, kind: ScheduleKind, why: String| {
        adapted.change(Setting::Schedule, why, kind.name(), |s| {
            s.pipeline = one(kind)
        });
    };
    let kind = adapted.strategy.pipeline.schedule;
    if kind.pytorch_name().is_none() {
        let why = format!("PyTorch does not have the schedule {kind}");
        to(adapted, ScheduleKind::OneForwardOneBackward, why);
    }
    if kind == ScheduleKind::Interleaved && !m.is_multiple_of((m / pp).max(1)) {
        let why = format!(
            "PyTorch interleaves in {} equal rounds, which do not divide {m} micro-batches",
            m / pp
        );
        to(adapted, ScheduleKind::OneForwardOneBackward, why);
    }
    if kind == ScheduleKind::DualPipeV && m < 2 * pp {
        let why = format!(
            "PyTorch's DualPipeV needs {} micro-batches, not {m}",
            2 * pp
        );
        to(adapted, ScheduleKind::ZeroBubbleV, why);
    }
    if adapted.strategy.pipeline.schedule == ScheduleKind::OneForwardOneBackward && m < pp {
        let why = format!("PyTorch's 1F1B needs {pp} micro-batches, not {m}");
        to(adapted, ScheduleKind::GPipe, why);
    }
    let layers = adapted.strategy.pipeline;
    let num_layers = adapted.shape.num_hidden_layers;
    if layers.schedule.num_chunks().is_none()
        && layers_per_stage(num_layers, pp, layers.stages_per_rank).is_none()
    {
        let why = format!(
            "{num_layers} layers with embedding and head do not divide into {} equal stages",
            pp.saturating_mul(layers.stages_per_rank)
        );
        adapted.change(Setting::Schedule, why, "2 stages per rank", |s| {
            s.pipeline.stages_per_rank = 2
        });
    }
    let stages = pp.saturating_mul(adapted.strategy.pipeline.stages_per_rank);
    if stages > num_layers + 2 {
        return Err(framework.unsupported(
            format!("{stages} stages"),
            format!("the model has {num_layers} layers, embedding and head"),
            format!("use at most {} stages", num_layers + 2),
        ));
    }
    Ok(())
}

/// The value of `pipeline_parallel_layers_per_stage` that gives `stages_per_rank` stages, or `None` if there is none.
/// `Some(None)` means the default of two stages per rank, without the key.
pub(super) fn layers_per_stage(
    num_layers: usize,
    pp: usize,
    stages_per_rank: usize,
) -> Option<Option<usize>> {
    if stages_per_rank == 2 {
        return Some(None);
    }
    let (units, stages) = (num_layers + 2, pp.checked_mul(stages_per_rank)?);
    let length = units.div_ceil(stages);
    (units.div_ceil(length) == stages).then_some(Some(length))
}
