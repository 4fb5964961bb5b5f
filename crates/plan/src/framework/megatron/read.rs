//! What Megatron-LM's flags say.

use trainyard_schedule::Kind;

use super::super::{FrameworkError, Read, Told, check, check_degrees};
use super::flags::Flags;
use super::{BF16, BF16_GRADIENTS, FP32, FRAMEWORK, fit, model};
use crate::{AttentionKernel, Degrees, Layers, Offload, Recompute, Shape, Software, Strategy};

/// Flags whose meaning a plan does not have: what they do, and what to do instead.
const REFUSED: [(&str, &str, &str); 16] = [
    (
        "--fp16",
        "losses in fp16 are scaled, and a plan knows types by their bytes",
        "use --bf16",
    ),
    (
        "--fp8-format",
        "a plan knows no types of one byte",
        "use --bf16",
    ),
    (
        "--fp4-format",
        "a plan knows no types of half a byte",
        "use --bf16",
    ),
    (
        "--use-precision-aware-optimizer",
        "its states have other types than a plan counts",
        "remove it",
    ),
    (
        "--use-torch-fsdp2",
        "it is another FSDP than Megatron's",
        "use --use-megatron-fsdp",
    ),
    (
        "--optimizer-cpu-offload",
        "it moves the optimiser's states alone, and a plan's offloading weights too",
        "remove it",
    ),
    (
        "--cpu-offloading-num-layers",
        "it moves activations, and a plan's offloading states",
        "remove it",
    ),
    (
        "--fine-grained-activation-offloading",
        "it moves activations, and a plan's offloading states",
        "remove it",
    ),
    (
        "--moe-layer-recompute",
        "a plan recomputes attention or whole blocks",
        "use --recompute-granularity",
    ),
    (
        "--distribute-saved-activations",
        "a plan keeps what is not recomputed whole",
        "use --sequence-parallel",
    ),
    (
        "--pipeline-model-parallel-layout",
        "a plan splits layers evenly",
        "use --num-virtual-stages-per-pipeline-rank",
    ),
    (
        "--decoder-first-pipeline-num-layers",
        "a plan splits layers evenly",
        "remove it",
    ),
    (
        "--decoder-last-pipeline-num-layers",
        "a plan splits layers evenly",
        "remove it",
    ),
    (
        "--rampup-batch-size",
        "a plan's batch has one size",
        "use --global-batch-size alone",
    ),
    (
        "--mtp-num-layers",
        "a plan's model predicts one token",
        "remove it",
    ),
    (
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "a plan interleaves as many micro-batches as there are ranks",
        "remove it",
    ),
];

pub(in super::super) fn read(text: &str, told: &Told) -> Result<Read, FrameworkError> {
    let flags = Flags::parse(text)?;
    for (flag, why, nearest) in REFUSED {
        if flags.has(flag) {
            return Err(FRAMEWORK.refusal(flag, why, nearest));
        }
    }
    let shape = model::read(&flags)?;
    let zero_stage = read_stage(&flags)?;
    let degrees = read_degrees(&flags, zero_stage, shape.as_ref(), told)?;
    let micro_batch = flags.needed("--micro-batch-size")?;
    let at_once = micro_batch.saturating_mul(degrees.data_parallel());
    let strategy = Strategy {
        degrees,
        zero_stage,
        sequence_parallel: flags.has("--sequence-parallel"),
        layers: read_layers(&flags, &degrees, shape.as_ref())?,
        global_batch: flags.number("--global-batch-size")?.unwrap_or(at_once),
        micro_batch,
        seq_len: flags.needed("--seq-length")?,
        recompute: read_recompute(&flags)?,
        offload: Offload::None,
        precision: match (flags.has("--bf16"), flags.has("--grad-reduce-in-bf16")) {
            (true, false) => BF16,
            (true, true) => BF16_GRADIENTS,
            (false, _) => FP32,
        },
    };
    check(FRAMEWORK, shape.as_ref(), &strategy)?;
    fit::check_interleaving(&strategy)?;
    if let Some(shape) = &shape {
        fit::check_shape(shape, &strategy)?;
    }
    Ok(Read {
        software: read_software(&flags, &strategy)?,
        shape,
        strategy,
        world: flags.world,
    })
}

/// What Megatron does with these flags: it overlaps, fuses and drops only as it is told, and drops a tenth
/// unless it is told not to.
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
            Ok(share) => Ok(share > 0.0),
            Err(_) => Err(FrameworkError::Value {
                key: flag.to_owned(),
                value: text,
                expected: "a share",
            }),
        },
    };
    Ok(Software {
        attention: match is_fused {
            true => AttentionKernel::Flash,
            false => AttentionKernel::Materialised,
        },
        dropout: drops("--attention-dropout")? || drops("--hidden-dropout")?,
        overlaps_data: flags.has("--overlap-grad-reduce"),
        overlaps_tensor: flags.has("--tp-comm-overlap"),
        gradient_on_wire: strategy.precision.gradient,
    })
}

fn read_stage(flags: &Flags) -> Result<usize, FrameworkError> {
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
    shape: Option<&Shape>,
    told: &Told,
) -> Result<Degrees, FrameworkError> {
    let tp = flags.degree("--tensor-model-parallel-size")?;
    let cp = flags.degree("--context-parallel-size")?;
    let pp = flags.degree("--pipeline-model-parallel-size")?;
    let data = FRAMEWORK.left_of(flags.world.or(told.world), &[tp, cp, pp])?;
    let ep = flags.degree("--expert-model-parallel-size")?;
    let has_experts = shape.is_some_and(|shape| shape.experts.is_some());
    let split = flags.number("--expert-tensor-parallel-size")?.unwrap_or(tp);
    if has_experts && split != 1 {
        return Err(FRAMEWORK.refusal(
            format!("experts split over {split} ranks of tp"),
            "a plan lays whole experts over dp_shard x cp x tp",
            "use --expert-tensor-parallel-size 1",
        ));
    }
    let copies = match zero_stage {
        0 => data,
        _ => flags.degree("--num-distributed-optimizer-instances")?,
    };
    if flags
        .get("--outer-dp-sharding-strategy")
        .is_some_and(|name| name != "no_shard")
    {
        return Err(FRAMEWORK.refusal(
            "--outer-dp-sharding-strategy",
            "a plan's copies share nothing",
            "use no_shard",
        ));
    }
    let shards = FRAMEWORK.left_of(Some(data), &[copies])?;
    // Where nothing is sharded, experts still lie over all data-parallel ranks.
    let (dp_replicate, dp_shard) = match ep > 1 && zero_stage == 0 {
        true => (1, data),
        false => (copies, shards),
    };
    let degrees = Degrees {
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

fn read_layers(
    flags: &Flags,
    degrees: &Degrees,
    shape: Option<&Shape>,
) -> Result<Layers, FrameworkError> {
    let stages = flags.number("--num-virtual-stages-per-pipeline-rank")?;
    let length = flags.number("--num-layers-per-virtual-pipeline-stage")?;
    let stages = match (stages, length) {
        (Some(stages), _) => stages,
        (None, None) => 1,
        (None, Some(length)) => {
            let flag = format!("--num-layers-per-virtual-pipeline-stage {length}");
            let Some(shape) = shape else {
                return Err(FRAMEWORK.untold("how many layers the model has", "give --num-layers"));
            };
            let ends = [
                "--account-for-embedding-in-pipeline-split",
                "--account-for-loss-in-pipeline-split",
            ];
            let ends = ends.iter().filter(|flag| flags.has(flag)).count();
            let units = shape.num_hidden_layers + ends;
            let whole = length
                .checked_mul(degrees.pp)
                .filter(|&n| n > 0 && units.is_multiple_of(n));
            let Some(whole) = whole else {
                return Err(FRAMEWORK.refusal(
                    flag,
                    format!(
                        "{units} layers are not shared evenly by {} ranks in such parts",
                        degrees.pp
                    ),
                    "use --num-virtual-stages-per-pipeline-rank",
                ));
            };
            units / whole
        }
    };
    Ok(Layers {
        schedule: match stages {
            1 => Kind::OneForwardOneBackward,
            _ => Kind::Interleaved,
        },
        stages_per_rank: stages,
    })
}

fn read_recompute(flags: &Flags) -> Result<Recompute, FrameworkError> {
    let granularity = match flags.get("--recompute-granularity") {
        None if flags.has("--recompute-activations") => Some("selective".to_owned()),
        granularity => granularity,
    };
    let refuse = |what: String| {
        Err(FRAMEWORK.refusal(
            what,
            "a plan recomputes the attention of every block, or every block",
            "use --recompute-granularity selective, or full with --recompute-method uniform and \
             --recompute-num-layers 1",
        ))
    };
    match granularity.as_deref() {
        None => Ok(Recompute::None),
        Some("selective") => match flags.get("--recompute-modules").as_deref() {
            None | Some("core_attn") => Ok(Recompute::Selective),
            Some(modules) => refuse(format!("--recompute-modules {modules}")),
        },
        Some("full") => {
            let method = flags.get("--recompute-method").unwrap_or_default();
            let layers = flags.degree("--recompute-num-layers")?;
            match (method.as_str(), layers) {
                ("uniform", 1) => Ok(Recompute::Full),
                _ => refuse(format!(
                    "--recompute-method {method} --recompute-num-layers {layers}"
                )),
            }
        }
        Some(other) => refuse(format!("--recompute-granularity {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::flags::arity;
    use super::*;

    #[test]
    fn every_flag_that_is_refused_exists() {
        for (flag, ..) in REFUSED {
            assert!(arity(flag).is_some(), "{flag}");
        }
    }
}
