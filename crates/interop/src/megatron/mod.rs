//! The command-line flags of Megatron-LM.
//!
//! Its distributed optimizer is ZeRO-1 with 6 + 12/N bytes per parameter: two for the weight, four for the gradient,
//! and twelve for the optimizer states, which are sharded over N ranks. ZeRO stages 2 and 3 are Megatron FSDP.

mod adapt;
mod flags;
mod keys;
mod model;
mod model_keys;
mod read;
mod translate;

use super::adapt::Adapted;
use super::arguments::torchrun;
use super::{EmittedConfig, Framework, FrameworkError};
pub(super) use read::read;
use trainyard_arch::DecoderConfig;
use trainyard_plan::{Precision, Recompute, Strategy};
pub(super) use translate::translate;

const FRAMEWORK: Framework = Framework::Megatron;

/// With `--bf16`.
const BF16: Precision = Precision::BF16;

/// With `--bf16 --grad-reduce-in-bf16`: the optimizer keeps fp32 copies of the gradients.
const BF16_GRADIENTS: Precision = Precision {
    gradient: 2,
    reduced: 2,
    optimizer: 16,
    ..BF16
};

/// Without `--bf16`.
const FP32: Precision = Precision::FP32;

pub(super) fn write(
    shape: &DecoderConfig,
    strategy: &Strategy,
) -> Result<EmittedConfig, FrameworkError> {
    let adapted = adapt::adapt(shape, strategy)?;
    Ok(EmittedConfig {
        text: text(&adapted),
        deviations: adapted.deviations,
    })
}

fn text(adapted: &Adapted) -> String {
    let s = &adapted.strategy;
    let mut lines = vec![format!(
        "{} pretrain_gpt.py",
        torchrun(s.degrees.world_size())
    )];
    // Megatron's overlap of compute and TP communication needs a single hardware queue; its FSDP needs several.
    if s.zero_stage < 2 && s.degrees.tp * s.degrees.cp > 1 {
        lines[0].insert_str(0, "CUDA_DEVICE_MAX_CONNECTIONS=1 ");
    }
    lines.extend(model::write(&adapted.shape));
    lines.extend(degree_flags(adapted));
    lines.extend(step_flags(s));
    lines.push("--mock-data --train-iters 10000 --lr 3e-4".to_owned());
    lines.join(" \\\n  ") + "\n"
}

fn degree_flags(adapted: &Adapted) -> Vec<String> {
    let s = &adapted.strategy;
    let d = &s.degrees;
    let mut flags = vec![
        format!("--tensor-model-parallel-size {}", d.tp),
        format!("--pipeline-model-parallel-size {}", d.pp),
        format!("--context-parallel-size {}", d.cp),
        format!("--expert-model-parallel-size {}", d.ep),
    ];
    if s.sequence_parallel {
        flags.push("--sequence-parallel".to_owned());
    }
    if s.pipeline.stages_per_rank > 1 {
        let stages = s.pipeline.stages_per_rank;
        flags.push(format!("--num-virtual-stages-per-pipeline-rank {stages}"));
    }
    if d.pp > 1 && adapt::counts_ends(&adapted.shape, s) {
        flags.push(
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
                .to_owned(),
        );
    }
    let fsdp = |strategy: &str| {
        format!(
            "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy {strategy} \
             --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion"
        )
    };
    match s.zero_stage {
        0 => {}
        1 => flags.push("--use-distributed-optimizer".to_owned()),
        2 => flags.push(fsdp("optim_grads")),
        _ => flags.push(fsdp("optim_grads_params")),
    }
    // The planner's estimate assumes that gradient and parameter communication overlaps with compute.
    if d.data_parallel() * d.cp > 1 {
        flags.push(match s.zero_stage {
            0 => "--overlap-grad-reduce".to_owned(),
            _ => "--overlap-grad-reduce --overlap-param-gather".to_owned(),
        });
    }
    if s.zero_stage > 0 && d.dp_replicate > 1 {
        flags.push(format!(
            "--num-distributed-optimizer-instances {}",
            d.dp_replicate
        ));
    }
    flags
}

fn step_flags(s: &Strategy) -> Vec<String> {
    let mut flags = vec![
        format!("--micro-batch-size {}", s.micro_batch),
        format!("--global-batch-size {}", s.global_batch),
        format!("--seq-length {}", s.seq_len),
    ];
    let recompute = match s.recompute {
        Recompute::None => "",
        Recompute::Selective => "--recompute-granularity selective",
        Recompute::SelectiveOp | Recompute::Full => {
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        }
    };
    let types = match s.precision {
        BF16 => "--bf16",
        BF16_GRADIENTS => "--bf16 --grad-reduce-in-bf16",
        _ => "",
    };
    let given = [recompute, types]
        .into_iter()
        .filter(|text| !text.is_empty());
    flags.extend(given.map(str::to_owned));
    flags
}
