//! Reads Megatron-LM's flags.

use trainyard_arch::DecoderConfig;
use trainyard_schedule::ScheduleKind;

use super::super::{FP16_UNMODELED, FrameworkError, LaunchInfo, ParsedJob, check, check_degrees};
use super::flags::Flags;
use super::{BF16, BF16_GRADIENTS, FP32, FRAMEWORK, adapt, model};
use trainyard_plan::{
    AttentionKernel, Degrees, Generation, Offload, Operators, PipelineLayout, Recompute, Software,
    Strategy, Synchronization,
};

/// Flags that the planner does not model: the flag, why, and what to use instead.
const UNSUPPORTED: [(&str, &str, &str); 15] = [
    (
        "--fp8-format",
        "the planner does not model 8-bit types",
        "use --bf16",
    ),
    (
        "--fp4-format",
        "the planner does not model 4-bit types",
        "use --bf16",
    ),
    (
        "--use-precision-aware-optimizer",
        "the planner does not model its state types",
        "remove it",
    ),
    (
        "--use-torch-fsdp2",
        "it is a different FSDP than Megatron's",
        "use --use-megatron-fsdp",
    ),
    (
        "--optimizer-cpu-offload",
        "it offloads optimizer states only, and the planner offloads weights, too",
        "remove it",
    ),
    (
        "--cpu-offloading-num-layers",
        "it offloads activations, and the planner offloads states",
        "remove it",
    ),
    (
        "--fine-grained-activation-offloading",
        "it offloads activations, and the planner offloads states",
        "remove it",
    ),
    (
        "--moe-layer-recompute",
        "the planner recomputes attention or entire blocks",
        "use --recompute-granularity",
    ),
    (
        "--distribute-saved-activations",
        "the planner does not shard saved activations this way",
        "use --sequence-parallel",
    ),
    (
        "--pipeline-model-parallel-layout",
        "the planner splits layers evenly",
        "use --num-virtual-stages-per-pipeline-rank",
    ),
    (
        "--decoder-first-pipeline-num-layers",
        "the planner splits layers evenly",
        "remove it",
    ),
    (
        "--decoder-last-pipeline-num-layers",
        "the planner splits layers evenly",
        "remove it",
    ),
    (
        "--rampup-batch-size",
        "the planner models a constant batch size",
        "use --global-batch-size alone",
    ),
    (
        "--mtp-num-layers",
        "the planner does not model multi-token prediction",
        "remove it",
    ),
    (
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "the planner interleaves groups of as many micro-batches as there are pipeline ranks",
        "remove it",
    ),
];

pub(in super::super) fn read(text: &str, launch: &LaunchInfo) -> Result<ParsedJob, FrameworkError> {
    let flags = Flags::parse(text)?;
    for (flag, why, nearest) in UNSUPPORTED {
        if flags.has(flag) {
            return Err(FRAMEWORK.unsupported(flag, why, nearest));
        }
    }
    let shape = model::read(&flags)?;
    let zero_stage = read_stage(&flags)?;
    let degrees = read_degrees(&flags, zero_stage, shape.as_ref(), launch)?;
    let micro_batch = flags.needed("--micro-batch-size")?;
    let at_once = micro_batch.saturating_mul(degrees.data_parallel());
    let strategy = Strategy {
        degrees,
        zero_stage,
        sequence_parallel: flags.has("--sequence-parallel"),
        pipeline: read_layers(&flags, &degrees, shape.as_ref())?,
        global_batch: flags.number("--global-batch-size")?.unwrap_or(at_once),
        micro_batch,
        seq_len: flags.needed("--seq-length")?,
        recompute: read_recompute(&flags)?,
        offload: Offload::None,
        // Types of two bytes are estimated alike; steps that overflow in fp16 are not.
        precision: match (
            flags.has("--bf16") || flags.has("--fp16"),
            flags.has("--grad-reduce-in-bf16"),
        ) {
            (true, false) => BF16,
            (true, true) => BF16_GRADIENTS,
            (false, _) => FP32,
        },
        synchronization: Synchronization::PLAIN,
        split_points: Vec::new(),
    };
    check(FRAMEWORK, shape.as_ref(), &strategy)?;
    adapt::check_interleaving(&strategy)?;
    if let Some(shape) = &shape {
        adapt::check_shape(shape, &strategy)?;
    }
    Ok(ParsedJob {
        software: read_software(&flags, &strategy)?,
        shape,
        strategy,
        world: flags.world,
        unmodeled: unmodeled(&flags),
    })
}

fn unmodeled(flags: &Flags) -> Vec<String> {
    let fp16 = flags.has("--fp16").then(|| FP16_UNMODELED.to_owned());
    fp16.into_iter().collect()
}

/// Megatron's behavior with these flags: overlap must be enabled, and dropout, 0.1 by default, must be disabled.
fn read_software(flags: &Flags, strategy: &Strategy) -> Result<Software, FrameworkError> {
    let is_fused = match flags.get("--attention-backend").as_deref() {
        Some("unfused" | "local") => false,
        Some(_) => true,
        None => {
            let is_local = flags.get("--transformer-impl").as_deref() == Some("local");
            flags.has("--use-flash-attn") || !is_local
        }
    };
    let drops = |flag: &str| match flags.get(flag) {
        None => Ok(true),
        Some(text) => match text.parse::<f64>() {
            Ok(probability) => Ok(probability > 0.0),
            Err(_) => Err(FrameworkError::Value {
                key: flag.to_owned(),
                value: text,
                expected: "a number",
            }),
        },
    };
    Ok(Software {
        generation: Generation::Current,
        operators: Operators::Fused,
        gathers_sequence_again: true,
        reduces_once: false,
        attention: if is_fused {
            AttentionKernel::Flash
        } else {
            AttentionKernel::Materialized
        },
        dropout: drops("--attention-dropout")? || drops("--hidden-dropout")?,
        overlaps_data: flags.has("--overlap-grad-reduce"),
        overlaps_tensor: flags.has("--tp-comm-overlap"),
        gradient_on_wire: strategy.precision.gradient,
        num_loss_chunks: 1,
    })
}

pub(super) fn read_stage(flags: &Flags) -> Result<usize, FrameworkError> {
    let sharded = usize::from(flags.has("--use-distributed-optimizer"));
    if !flags.has("--use-megatron-fsdp") {
        return Ok(sharded);
    }
    match flags.get("--data-parallel-sharding-strategy").as_deref() {
        None | Some("no_shard") => Ok(0),
        Some("optim") => Ok(1),
        Some("optim_grads") => Ok(2),
        Some("optim_grads_params") => Ok(3),
        Some(other) => Err(FrameworkError::Value {
            key: "--data-parallel-sharding-strategy".to_owned(),
            value: other.to_owned(),
            expected: "no_shard, optim, optim_grads or optim_grads_params",
        }),
    }
}

fn read_degrees(
    flags: &Flags,
    zero_stage: usize,
    shape: Option<&DecoderConfig>,
    launch: &LaunchInfo,
) -> Result<Degrees, FrameworkError> {
    let tp = flags.degree("--tensor-model-parallel-size")?;
    let cp = flags.degree("--context-parallel-size")?;
    let pp = flags.degree("--pipeline-model-parallel-size")?;
    let data = FRAMEWORK.left_of(flags.world.or(launch.world), &[tp, cp, pp])?;
    let ep = flags.degree("--expert-model-parallel-size")?;
    let has_experts = shape.is_some_and(|shape| shape.moe.is_some());
    let split = flags.number("--expert-tensor-parallel-size")?.unwrap_or(tp);
    if has_experts && split != 1 {
        return Err(FRAMEWORK.unsupported(
            format!("experts split over {split} tensor-parallel ranks"),
            "the planner distributes unsplit experts over dp_shard x cp x tp",
            "use --expert-tensor-parallel-size 1",
        ));
    }
    let replicas = match zero_stage {
        0 => data,
        _ => flags.degree("--num-distributed-optimizer-instances")?,
    };
    if flags
        .get("--outer-dp-sharding-strategy")
        .is_some_and(|name| name != "no_shard")
    {
        return Err(FRAMEWORK.unsupported(
            "--outer-dp-sharding-strategy",
            "the planner shards nothing across replicas",
            "use no_shard",
        ));
    }
    let shards = FRAMEWORK.left_of(Some(data), &[replicas])?;
    // Without sharding, experts are still distributed over all data-parallel ranks.
    let (dp_replicate, dp_shard) = if ep > 1 && zero_stage == 0 {
        (1, data)
    } else {
        (replicas, shards)
    };
    let degrees = Degrees {
        dp_outer: 1,
        pp,
        dp_replicate,
        dp_shard,
        cp,
        tp,
        ep,
    };
    check_degrees(FRAMEWORK, &degrees)?;
    Ok(degrees)
}

pub(super) fn read_layers(
    flags: &Flags,
    degrees: &Degrees,
    shape: Option<&DecoderConfig>,
) -> Result<PipelineLayout, FrameworkError> {
    let stages = flags.number("--num-virtual-stages-per-pipeline-rank")?;
    let length = flags.number("--num-layers-per-virtual-pipeline-stage")?;
    let stages = match (stages, length) {
        (Some(stages), _) => stages,
        (None, None) => 1,
        (None, Some(length)) => {
            let flag = format!("--num-layers-per-virtual-pipeline-stage {length}");
            let Some(shape) = shape else {
                return Err(FRAMEWORK.unspecified("the number of layers", "add --num-layers"));
            };
            let ends = [
                "--account-for-embedding-in-pipeline-split",
                "--account-for-loss-in-pipeline-split",
            ];
            let ends = ends.iter().filter(|flag| flags.has(flag)).count();
            let units = shape.num_hidden_layers + ends;
            let per_round = length
                .checked_mul(degrees.pp)
                .filter(|&n| n > 0 && units.is_multiple_of(n));
            let Some(per_round) = per_round else {
                return Err(FRAMEWORK.unsupported(
                    flag,
                    format!(
                        "{units} layers do not divide evenly into such stages on {} pipeline ranks",
                        degrees.pp
                    ),
                    "use --num-virtual-stages-per-pipeline-rank",
                ));
            };
            units / per_round
        }
    };
    Ok(PipelineLayout {
        schedule: match stages {
            1 => ScheduleKind::OneForwardOneBackward,
            _ => ScheduleKind::Interleaved,
        },
        stages_per_rank: stages,
    })
}

fn read_recompute(flags: &Flags) -> Result<Recompute, FrameworkError> {
    let granularity = match flags.get("--recompute-granularity") {
        None if flags.has("--recompute-activations") => Some("selective".to_owned()),
        granularity => granularity,
    };
    let reject = |what: String| {
        Err(FRAMEWORK.unsupported(
            what,
            "the planner recomputes the attention of every block, or every block",
            "use --recompute-granularity selective, or full with --recompute-method uniform and \
             --recompute-num-layers 1",
        ))
    };
    match granularity.as_deref() {
        None => Ok(Recompute::None),
        Some("selective") => match flags.get("--recompute-modules").as_deref() {
            None | Some("core_attn") => Ok(Recompute::Selective),
            Some(modules) => reject(format!("--recompute-modules {modules}")),
        },
        Some("full") => {
            let method = flags.get("--recompute-method").unwrap_or_default();
            let layers = flags.degree("--recompute-num-layers")?;
            match (method.as_str(), layers) {
                ("uniform", 1) => Ok(Recompute::Full),
                _ => reject(format!(
                    "--recompute-method {method} --recompute-num-layers {layers}"
                )),
            }
        }
        Some(other) => reject(format!("--recompute-granularity {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::flags::arity;
    use super::*;

    #[test]
    fn every_unsupported_flag_exists() {
        for (flag, ..) in UNSUPPORTED {
            assert!(arity(flag).is_some(), "{flag}");
        }
    }
}
