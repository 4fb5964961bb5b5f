//! Reads Trainyard's TOML.

use trainyard_config::{
    ActivationCheckpointMode, Config, Dtype, ModelSpec, OffloadStates, OptimizerName,
    PipelineReduce, SelectiveOption,
};
use trainyard_mesh::Axis;

use super::super::{FP16_UNMODELED, FrameworkError, LaunchInfo, OFFLOAD_UNMODELED, ParsedJob};
use super::{FRAMEWORK, TYPES, synchronization};
use trainyard_plan::{
    Degrees, Offload, PipelineLayout, PrecisionByStage, Recompute, Software, Strategy,
};

pub(in super::super) fn read(text: &str, launch: &LaunchInfo) -> Result<ParsedJob, FrameworkError> {
    let config = Config::parse(text, &launch.overrides)?;
    let ModelSpec::Decoder(shape) = config.model.resolve()? else {
        let (why, nearest) = (
            "the planner supports decoders only",
            "use \"llama\" or \"gpt2\"",
        );
        return Err(FRAMEWORK.unsupported("model.name = \"cnn\"", why, nearest));
    };
    let (degrees, world) = read_degrees(&config, launch)?;
    let batching = config.batching(degrees.data_parallel())?;
    let p = &config.parallelism;
    if let Some(path) = &p.pipeline_parallel_schedule_csv {
        return Err(FRAMEWORK.unsupported(
            format!("pipeline_parallel_schedule_csv = {path:?}"),
            "the planner supports named schedules only",
            "use pipeline_parallel_schedule",
        ));
    }
    let mut unmodeled: Vec<String> = Vec::new();
    if is_fp16(&config) {
        unmodeled.push(FP16_UNMODELED.to_owned());
    }
    unmodeled.extend(synchronization::unmodeled(&config));
    let offload = match p.offload {
        trainyard_config::Offload::None => Offload::None,
        _ if p.offload_states == OffloadStates::Optimizer => {
            unmodeled.push(format!(
                "parallelism.offload_states = \"optimizer\": {OFFLOAD_UNMODELED}"
            ));
            Offload::None
        }
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
        pipeline: PipelineLayout {
            schedule,
            stages_per_rank: match degrees.pp {
                1 => 1,
                _ => schedule
                    .num_chunks()
                    .unwrap_or(p.pipeline_parallel_stages_per_rank),
            },
        },
        global_batch: batching.global,
        micro_batch: batching.local,
        seq_len: config.training.seq_len,
        recompute: read_recompute(&config)?,
        offload,
        precision: read_precision(&config)?.at(zero_stage),
        synchronization: synchronization::read(&config),
        split_points: Vec::new(),
    };
    let split_points = match p.split_points()? {
        Some(points) => points,
        None => strategy.balanced_split_points(&shape).map_err(|error| {
            let points = "pipeline_parallel_degree";
            FRAMEWORK.unsupported(points, error.to_string(), "use fewer stages")
        })?,
    };
    let strategy = strategy.with_split_points(split_points, shape.num_hidden_layers);
    Ok(ParsedJob {
        software: read_software(&config),
        shape: Some(*shape),
        strategy,
        world,
        unmodeled,
    })
}

fn is_fp16(config: &Config) -> bool {
    config.training.compute_dtype() == Dtype::Float16
}

fn read_software(config: &Config) -> Software {
    let (training, section) = (&config.training, &config.parallelism);
    let reduce_dtype = training.mixed_precision_reduce.unwrap_or(training.dtype);
    Software {
        dropout: config
            .model
            .resid_pdrop
            .is_some_and(|probability| probability > 0.0),
        gradient_on_wire: reduce_dtype.size(),
        num_loss_chunks: training.num_loss_chunks,
        gathers_sequence_again: section.sequence_parallel_regather,
        reduces_once: section.pipeline_parallel_degree > 1
            && section.zero_stage > 1
            && section.pipeline_parallel_reduce == PipelineReduce::Once,
        ..Software::MODERN
    }
}

/// The parallel degrees, and the world size if the config determines it.
fn read_degrees(
    config: &Config,
    launch: &LaunchInfo,
) -> Result<(Degrees, Option<usize>), FrameworkError> {
    let p = &config.parallelism;
    let degrees = [
        p.data_parallel_outer_degree,
        p.data_parallel_replicate_degree,
        p.data_parallel_shard_degree,
        p.pipeline_parallel_degree,
        p.context_parallel_degree,
        p.tensor_parallel_degree,
    ];
    let fixed = degrees.iter().try_fold(1usize, |product, &degree| {
        product.checked_mul(usize::try_from(degree).ok()?)
    });
    let Some(world) = launch.world.or(fixed) else {
        return Err(FRAMEWORK.unspecified(
            "the number of ranks",
            "set data_parallel_replicate_degree to a number instead of -1, or pass the world size separately",
        ));
    };
    let mesh = config.mesh(world)?;
    let degrees = Degrees {
        dp_outer: mesh.size(Axis::DpOuter),
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
        (ActivationCheckpointMode::Selective, SelectiveOption::Every(k)) => Err(FRAMEWORK
            .unsupported(
                format!("selective_ac_option = \"{k}\""),
                "the planner models the same recomputation in every block",
                "use \"attention\", or mode = \"full\"",
            )),
        (ActivationCheckpointMode::MemoryBudget, _) => Err(FRAMEWORK.unsupported(
            "activation_checkpoint.mode = \"memory_budget\"",
            "only a dry run determines what it recomputes",
            "use \"none\", \"selective\" or \"full\"",
        )),
    }
}

fn read_precision(config: &Config) -> Result<PrecisionByStage, FrameworkError> {
    let has_two_states = [OptimizerName::AdamW, OptimizerName::Lamb];
    let name = &config.optimizer.name;
    if !has_two_states.iter().any(|known| name == known) {
        return Err(FRAMEWORK.unsupported(
            format!("optimizer.name = {name:?}"),
            "the planner models the two optimizer states per parameter that AdamW and LAMB have",
            "use \"AdamW\"",
        ));
    }
    let held = config.training.dtype;
    // Types of two bytes are estimated alike.
    let computed = match config.training.compute_dtype() {
        Dtype::Float16 => Dtype::Bfloat16,
        dtype => dtype,
    };
    let known = TYPES
        .iter()
        .find(|(_, dtype, compute)| (*dtype, *compute) == (held, computed));
    known.map(|(precision, ..)| *precision).ok_or_else(|| {
        FRAMEWORK.unsupported(
            format!("mixed_precision_param = \"{}\"", computed.name()),
            "the planner does not model these types",
            "use \"bfloat16\" with training.dtype = \"float32\"",
        )
    })
}
