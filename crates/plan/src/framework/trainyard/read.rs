//! What our own TOML says.

use trainyard_config::{ActivationCheckpointMode, Config, OptimizerName, SelectiveOption};
use trainyard_mesh::Axis;

use super::super::{FrameworkError, Read, Told};
use super::{FRAMEWORK, TYPES};
use crate::{Degrees, Held, Layers, Offload, Recompute, Shape, Software, Strategy};

pub(in super::super) fn read(text: &str, told: &Told) -> Result<Read, FrameworkError> {
    let config = Config::parse(text, &[])?;
    let Ok(shape) = Shape::try_from(&config.model.resolve()?) else {
        let (why, nearest) = ("strategies are about decoders", "use \"llama\" or \"gpt2\"");
        return Err(FRAMEWORK.refusal("model.name = \"cnn\"", why, nearest));
    };
    let (degrees, world) = read_degrees(&config, told)?;
    let batching = config.batching(degrees.data_parallel())?;
    let p = &config.parallelism;
    if let Some(path) = &p.pipeline_parallel_schedule_csv {
        return Err(FRAMEWORK.refusal(
            format!("pipeline_parallel_schedule_csv = {path:?}"),
            "a plan knows schedules by name",
            "use pipeline_parallel_schedule",
        ));
    }
    let offload = match p.offload {
        trainyard_config::Offload::None => Offload::None,
        trainyard_config::Offload::Cpu => Offload::Cpu,
        trainyard_config::Offload::Nvme => Offload::Nvme,
    };
    let is_sharded = degrees.dp_shard > 1 || offload != Offload::None;
    let schedule = p.schedule_kind()?;
    let zero_stage = if is_sharded { p.zero_stage } else { 0 };
    let strategy = Strategy {
        degrees,
        zero_stage,
        sequence_parallel: p.enable_sequence_parallel,
        layers: Layers {
            schedule,
            stages_per_rank: p.pipeline_parallel_stages_per_rank,
        },
        global_batch: batching.global,
        micro_batch: batching.local,
        seq_len: config.training.seq_len,
        recompute: read_recompute(&config)?,
        offload,
        precision: read_held(&config)?.at(zero_stage),
    };
    Ok(Read {
        software: read_software(&config),
        shape: Some(shape),
        strategy,
        world,
    })
}

fn read_software(config: &Config) -> Software {
    let training = &config.training;
    let travels = training.mixed_precision_reduce.unwrap_or(training.dtype);
    Software {
        dropout: config.model.resid_pdrop.is_some_and(|share| share > 0.0),
        gradient_on_wire: travels.size(),
        ..Software::MODERN
    }
}

/// The sizes of the axes, and how many ranks the text itself says there are.
fn read_degrees(config: &Config, told: &Told) -> Result<(Degrees, Option<usize>), FrameworkError> {
    let p = &config.parallelism;
    let degrees = [
        p.data_parallel_replicate_degree,
        p.data_parallel_shard_degree,
        p.pipeline_parallel_degree,
        p.context_parallel_degree,
        p.tensor_parallel_degree,
    ];
    let fixed = degrees.iter().try_fold(1usize, |product, &degree| {
        product.checked_mul(usize::try_from(degree).ok()?)
    });
    let Some(world) = told.world.or(fixed) else {
        return Err(FRAMEWORK.untold(
            "how many ranks there are",
            "give data_parallel_replicate_degree a number instead of -1, or tell the ranks beside it",
        ));
    };
    let mesh = config.mesh(world)?;
    let degrees = Degrees {
        pp: mesh.size(Axis::Pp),
        dp_replicate: mesh.size(Axis::DpReplicate),
        dp_shard: mesh.size(Axis::DpShard),
        cp: mesh.size(Axis::Cp),
        tp: mesh.size(Axis::Tp),
        ep: mesh.ep(),
    };
    Ok((degrees, fixed))
}

fn read_recompute(config: &Config) -> Result<Recompute, FrameworkError> {
    let section = &config.activation_checkpoint;
    match (section.mode, section.selective()?) {
        (ActivationCheckpointMode::None, _) => Ok(Recompute::None),
        (ActivationCheckpointMode::Full, _) => Ok(Recompute::Full),
        (ActivationCheckpointMode::Selective, SelectiveOption::Attention) => {
            Ok(Recompute::Selective)
        }
        (ActivationCheckpointMode::Selective, SelectiveOption::Every(1)) => Ok(Recompute::Full),
        (ActivationCheckpointMode::Selective, SelectiveOption::Every(k)) => Err(FRAMEWORK.refusal(
            format!("selective_ac_option = \"{k}\""),
            "a plan recomputes the same in every block",
            "use \"attention\", or mode = \"full\"",
        )),
        (ActivationCheckpointMode::MemoryBudget, _) => Err(FRAMEWORK.refusal(
            "activation_checkpoint.mode = \"memory_budget\"",
            "what it recomputes is found by a dry run",
            "use \"none\", \"selective\" or \"full\"",
        )),
    }
}

fn read_held(config: &Config) -> Result<Held, FrameworkError> {
    if matches!(
        config.optimizer.name,
        OptimizerName::Sgd | OptimizerName::Lars
    ) {
        return Err(FRAMEWORK.refusal(
            format!("optimizer.name = {:?}", config.optimizer.name),
            "a plan counts two states of a parameter, and this has one",
            "use \"AdamW\"",
        ));
    }
    let (held, computed) = (config.training.dtype, config.training.compute_dtype());
    let known = TYPES
        .iter()
        .find(|(_, dtype, compute)| (*dtype, *compute) == (held, computed));
    known.map(|(held, ..)| *held).ok_or_else(|| {
        FRAMEWORK.refusal(
            format!("mixed_precision_param = \"{}\"", computed.name()),
            "a plan knows types by their bytes, and losses in float16 are scaled",
            "use \"bfloat16\"",
        )
    })
}
