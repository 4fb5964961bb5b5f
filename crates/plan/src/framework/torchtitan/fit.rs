//! From any strategy to the nearest that torchtitan can be told.

use trainyard_schedule::Kind;

use super::super::fit::Fit;
use super::super::{Choice, Framework, FrameworkError};
use super::flavors::Flavor;
use super::{PRECISIONS, mixes_types, precision};
use crate::{Layers, Offload, Recompute, Shape, Strategy};

/// The nearest that this version can be told, and the model's name in it.
pub(super) fn fit(
    framework: Framework,
    shape: &Shape,
    strategy: &Strategy,
) -> Result<(Fit, &'static Flavor), FrameworkError> {
    let mut fit = Fit::new(shape, strategy);
    let flavor = fit_model(framework, &mut fit)?;
    fit_offload(framework, &mut fit);
    fit_sharding(framework, &mut fit);
    fit_precision(framework, &mut fit);
    if framework == Framework::Torchtitan
        && fit.strategy.degrees.tp > 1
        && !fit.strategy.sequence_parallel
    {
        let why = "0.2.2 shares positions wherever it shares matrices";
        fit.change(Choice::SequenceParallel, why, "sequence parallelism", |s| {
            s.sequence_parallel = true;
        });
    }
    let is_sparse = fit.shape.experts.is_some() || fit.shape.latent.is_some();
    if fit.strategy.recompute == Recompute::Products && is_sparse {
        let why = "a plan knows what its \"selective\" keeps of dense blocks alone";
        fit.change(Choice::Recompute, why, "full recomputation", |s| {
            s.recompute = Recompute::Full
        });
    }
    if fit.strategy.recompute == Recompute::Selective {
        let why = "its \"selective\" keeps attention and recomputes every second matrix product";
        let written = "full recomputation, which keeps less and computes more again";
        fit.change(Choice::Recompute, why, written, |s| {
            s.recompute = Recompute::Full
        });
    }
    fit_schedule(framework, &mut fit)?;
    Ok((fit, flavor))
}

fn fit_model(framework: Framework, fit: &mut Fit) -> Result<&'static Flavor, FrameworkError> {
    let is_offered = |flavor: &Flavor| match framework {
        Framework::Torchtitan => true,
        _ => flavor.config.is_some_and(|config| !config.is_float8),
    };
    if let Some(flavor) = Flavor::of(&fit.shape, is_offered) {
        return Ok(flavor);
    }
    let Some(flavor) = Flavor::nearest(&fit.shape, is_offered) else {
        return Err(framework.refusal("the model", "nothing is registered", "register it"));
    };
    let why = match Flavor::of(&fit.shape, |flavor| flavor.config.is_some()) {
        Some(_) => "the registered config multiplies matrices in float8, which no flag turns off",
        None => "no config of this shape is registered",
    };
    let written = format!(
        "{} {}; to train yours, register it in Python and change the name",
        flavor.module, flavor.name
    );
    let shape = flavor.shape(fit.strategy.seq_len);
    let has_experts = shape.experts.is_some();
    fit.change_model(why, written, shape);
    if fit.strategy.degrees.ep > 1 && !has_experts {
        let why = "that model has no experts";
        fit.change(Choice::ExpertParallel, why, "1", |s| s.degrees.ep = 1);
    }
    Ok(flavor)
}

fn fit_offload(framework: Framework, fit: &mut Fit) {
    if fit.strategy.offload == Offload::Nvme {
        let why = "it offloads to main memory only";
        fit.change(Choice::Offload, why, "enable_cpu_offload", |s| {
            s.offload = Offload::Cpu
        });
    }
    let d = &fit.strategy.degrees;
    let is_alone = d.dp_shard * d.cp == 1 && fit.strategy.offload != Offload::None;
    if is_alone && framework == Framework::Torchtitan {
        let why = "0.2.2 offloads what FSDP shards, and here nothing is sharded";
        fit.change(Choice::Offload, why, "no offloading", |s| {
            s.offload = Offload::None
        });
    }
    if fit.strategy.offload != Offload::None && fit.strategy.zero_stage < 2 {
        let why = "what is offloaded is sharded, gradients and all";
        fit.change(Choice::ZeroStage, why, "stage 3", |s| s.zero_stage = 3);
    }
}

fn fit_sharding(framework: Framework, fit: &mut Fit) {
    let s = &fit.strategy;
    let d = &s.degrees;
    // Copies beside anything else are refused by 0.2.2.
    let may_copy = framework == Framework::TorchtitanCommandLine || d.cp * d.tp * d.pp == 1;
    let is_plain =
        s.zero_stage == 0 && d.cp == 1 && (d.data_parallel() == 1 || (d.ep == 1 && may_copy));
    if s.zero_stage >= 2 || is_plain {
        return;
    }
    if s.zero_stage == 1 {
        let why = "FSDP shards gradients wherever it shards states";
        fit.change(Choice::ZeroStage, why, "stage 2, which holds less", |s| {
            s.zero_stage = 2
        });
        return;
    }
    let why = if d.cp > 1 {
        "FSDP shards over cp wherever there is cp"
    } else if d.ep > 1 {
        "expert parallelism is laid over ranks that shard"
    } else {
        "0.2.2 has no copies beside other axes"
    };
    let written = "stage 2 over all data-parallel ranks, which holds less";
    fit.change(Choice::ZeroStage, why, written, |s| {
        s.degrees.dp_shard *= s.degrees.dp_replicate;
        s.degrees.dp_replicate = 1;
        s.zero_stage = 2;
    });
}

fn fit_precision(framework: Framework, fit: &mut Fit) {
    let offered = PRECISIONS.map(|(precision, ..)| precision);
    fit.choose_precision(
        &offered,
        "weights have no second copy beside the optimiser's",
    );
    let mixed = precision(2, 4);
    if fit.strategy.precision == mixed && !mixes_types(framework, &fit.strategy) {
        let why = "0.2.2 mixes types with TP or PP only where FSDP or CP is on";
        fit.change(Choice::Precision, why, "everything in float32", |s| {
            s.precision = precision(4, 4)
        });
    }
}

fn fit_schedule(framework: Framework, fit: &mut Fit) -> Result<(), FrameworkError> {
    let pp = fit.strategy.degrees.pp;
    if pp == 1 {
        return Ok(());
    }
    let m = fit.strategy.num_microbatches();
    let one = |schedule| Layers {
        schedule,
        stages_per_rank: schedule.num_chunks().unwrap_or(2),
    };
    let to = |fit: &mut Fit, kind: Kind, why: String| {
        fit.change(Choice::Schedule, why, kind.name(), |s| s.layers = one(kind));
    };
    let kind = fit.strategy.layers.schedule;
    if kind == Kind::ZeroBubbleH1 {
        let why = "zb-h1 has one stage per rank, and torch's zero-bubble schedules have two";
        to(fit, Kind::OneForwardOneBackward, why.to_owned());
    }
    if kind == Kind::Interleaved && !m.is_multiple_of((m / pp).max(1)) {
        let why = format!(
            "torch interleaves in {} equal rounds, not {m} micro-batches",
            m / pp
        );
        to(fit, Kind::OneForwardOneBackward, why);
    }
    if kind == Kind::DualPipeV && m < 2 * pp {
        let why = format!("torch's DualPipeV needs {} micro-batches, not {m}", 2 * pp);
        to(fit, Kind::ZeroBubbleV, why);
    }
    if fit.strategy.layers.schedule == Kind::OneForwardOneBackward && m < pp {
        let why = format!("torch's 1F1B needs {pp} micro-batches, not {m}");
        to(fit, Kind::GPipe, why);
    }
    let layers = fit.strategy.layers;
    let num_layers = fit.shape.num_hidden_layers;
    if layers.schedule.num_chunks().is_none()
        && layers_per_stage(num_layers, pp, layers.stages_per_rank).is_none()
    {
        let why = format!(
            "{num_layers} layers and two ends do not make {} stages of one length",
            pp.saturating_mul(layers.stages_per_rank)
        );
        fit.change(Choice::Schedule, why, "2 stages per rank", |s| {
            s.layers.stages_per_rank = 2
        });
    }
    let stages = pp.saturating_mul(fit.strategy.layers.stages_per_rank);
    if stages > num_layers + 2 {
        return Err(framework.refusal(
            format!("{stages} stages"),
            format!("the model has {num_layers} layers and two ends"),
            format!("use at most {} stages", num_layers + 2),
        ));
    }
    Ok(())
}

/// What `pipeline_parallel_layers_per_stage` makes so many stages per rank; `Some(None)` where two, the
/// default, are wanted.
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
