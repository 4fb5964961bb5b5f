//! The JSON config of DeepSpeed.
//!
//! The JSON sets batch sizes, ZeRO, offloading and number types. The training script sets pipeline parallelism,
//! recomputation, the sequence length and the model. So that a file can be read back, the writer records those under
//! the key `"trainyard"`, which DeepSpeed ignores, and reports each that the script must set as a deviation.

mod axes;
mod batch;
mod file;
mod keys;
mod moe;
mod optimizer;
mod precision;
mod read;
mod scheduler;
mod translate;
mod zero;

use serde_json::{Map, Value, json};
use trainyard_arch::DecoderConfig;
use trainyard_schedule::ScheduleKind;

use super::adapt::Adapted;
use super::arguments::torchrun;
use super::{EmittedConfig, Framework, FrameworkError, Setting};
pub(super) use file::{File, invalid, whole};
pub(super) use read::{read, read_value};
use trainyard_plan::{Offload, PipelineLayout, Precision, Recompute, Strategy};
pub(super) use translate::{translate, translate_value};

const FRAMEWORK: Framework = Framework::DeepSpeed;

/// The key of the settings that the training script must make.
const NOTES: &str = "trainyard";

/// With `bf16`: the optimizer keeps its own 4-byte weights and gradients.
const BF16: Precision = Precision {
    compute: 2,
    parameter: 2,
    gradient: 2,
    reduced: 2,
    optimizer: 16,
};

/// With `bf16` and gradients accumulated in 4 bytes.
const BF16_WIDE: Precision = Precision {
    gradient: 4,
    reduced: 4,
    optimizer: 12,
    ..BF16
};

/// Without `bf16`: ZeRO keeps a copy of the weights even though they have the same type.
const fn fp32(zero_stage: usize) -> Precision {
    Precision {
        optimizer: if zero_stage == 0 { 8 } else { 12 },
        ..Precision::FP32
    }
}

const PIPELINE: PipelineLayout = PipelineLayout {
    schedule: ScheduleKind::OneForwardOneBackward,
    stages_per_rank: 1,
};

pub(super) fn write(
    shape: &DecoderConfig,
    strategy: &Strategy,
) -> Result<EmittedConfig, FrameworkError> {
    let mut adapted = Adapted::new(shape, strategy);
    adapted.synchronize_in_every_step();
    adapt_offload(&mut adapted);
    adapt_sharding(&mut adapted);
    adapt_rest(&mut adapted);
    note_set_elsewhere(&mut adapted);
    let text = serde_json::to_string_pretty(&json_of(&adapted.strategy));
    Ok(EmittedConfig {
        text: text.map_err(|error| FRAMEWORK.syntax(error))? + "\n",
        deviations: adapted.deviations,
    })
}

fn adapt_offload(adapted: &mut Adapted) {
    let s = &adapted.strategy;
    if s.offload == Offload::None || s.zero_stage == 3 {
        return;
    }
    let why = "DeepSpeed offloads weights in ZeRO stage 3 only";
    match s.degrees.pp {
        1 => adapted.change(Setting::ZeroStage, why, "stage 3", |s| s.zero_stage = 3),
        _ => adapted.change(
            Setting::Offload,
            format!("{why}, which does not support pipelines"),
            "no offloading",
            |s| s.offload = Offload::None,
        ),
    }
}

fn adapt_sharding(adapted: &mut Adapted) {
    let s = &adapted.strategy;
    if s.degrees.pp > 1 && s.zero_stage > 1 {
        if s.offload != Offload::None {
            let why =
                "DeepSpeed offloads weights in ZeRO stage 3 only, which does not support pipelines";
            adapted.change(Setting::Offload, why, "no offloading", |s| {
                s.offload = Offload::None
            });
        }
        let why = "ZeRO stages 2 and 3 do not support pipelines";
        adapted.change(Setting::ZeroStage, why, "stage 1", |s| s.zero_stage = 1);
    }
    let d = &adapted.strategy.degrees;
    if adapted.strategy.zero_stage > 0 && d.dp_replicate > 1 {
        let why = "DeepSpeed shards states over all data-parallel ranks";
        let written = format!("{} shards", d.data_parallel());
        adapted.change(Setting::DataParallel, why, written, |s| {
            s.degrees.dp_shard = s.degrees.data_parallel();
            s.degrees.dp_replicate = 1;
        });
    }
    let d = &adapted.strategy.degrees;
    let over_data = greatest_common_divisor(d.ep, d.data_parallel());
    if over_data != d.ep {
        let why = "DeepSpeed shards experts over data-parallel ranks only";
        let written = format!("expert parallelism of degree {over_data}");
        adapted.change(Setting::ExpertParallel, why, written, |s| {
            s.degrees.ep = over_data
        });
    }
}

fn adapt_rest(adapted: &mut Adapted) {
    if adapted.strategy.sequence_parallel {
        let why = "DeepSpeed's tensor parallelism does not shard the sequence";
        adapted.change(
            Setting::SequenceParallel,
            why,
            "no sequence parallelism",
            |s| s.sequence_parallel = false,
        );
    }
    if adapted.strategy.pipeline != PIPELINE {
        let why = "DeepSpeed's pipelines support 1F1B only";
        adapted.change(Setting::Schedule, why, "1F1B", |s| s.pipeline = PIPELINE);
    }
    if matches!(
        adapted.strategy.recompute,
        Recompute::Selective | Recompute::SelectiveOp
    ) {
        let why =
            "DeepSpeed recomputes the modules that the script marks, and has no selective policy";
        adapted.change(
            Setting::Recompute,
            why,
            "full recomputation of every block",
            |s| s.recompute = Recompute::Full,
        );
    }
    let offered = [BF16, BF16_WIDE, fp32(adapted.strategy.zero_stage)];
    adapted.choose_precision(
        &offered,
        "DeepSpeed keeps weights beside the optimizer's fp32 copy",
    );
}

/// Records the settings that the training script must make.
fn note_set_elsewhere(adapted: &mut Adapted) {
    let (d, recompute, seq_len) = (
        adapted.strategy.degrees,
        adapted.strategy.recompute,
        adapted.strategy.seq_len,
    );
    let outside = "DeepSpeed's JSON has no key for it";
    adapted.set_elsewhere(
        Setting::Model,
        outside,
        "build the model in the training script",
    );
    adapted.set_elsewhere(
        Setting::SequenceLength,
        outside,
        format!("use samples of {seq_len} tokens in the training script"),
    );
    if d.pp > 1 {
        let how = format!("deepspeed.pipe.PipelineModule(..., num_stages={})", d.pp);
        adapted.set_elsewhere(Setting::PipelineParallel, outside, how);
    }
    if d.cp > 1 {
        let how = format!("Ulysses: DistributedAttention over a group of {}", d.cp);
        adapted.set_elsewhere(Setting::ContextParallel, outside, how);
    }
    if d.ep > 1 {
        let how = format!("deepspeed.moe.layer.MoE(..., ep_size={})", d.ep);
        adapted.set_elsewhere(Setting::ExpertParallel, outside, how);
    }
    if recompute == Recompute::Full {
        let how = "model.gradient_checkpointing_enable(), or deepspeed.checkpointing.checkpoint around every block";
        adapted.set_elsewhere(Setting::Recompute, outside, how);
    }
}

fn json_of(s: &Strategy) -> Value {
    let d = &s.degrees;
    let mut zero = Map::new();
    zero.insert("stage".to_owned(), json!(s.zero_stage));
    if s.zero_stage > 0 && s.degrees.pp == 1 {
        // The planner's estimate assumes overlap; only stage 3 overlaps by default.
        zero.insert("overlap_comm".to_owned(), json!(true));
    }
    if let Some(device) = match s.offload {
        Offload::None => None,
        Offload::Cpu => Some(json!({ "device": "cpu", "pin_memory": true })),
        Offload::Nvme => Some(json!({ "device": "nvme", "nvme_path": "/local_nvme" })),
    } {
        zero.insert("offload_optimizer".to_owned(), device.clone());
        zero.insert("offload_param".to_owned(), device);
    }
    let mut root = json!({
        "train_batch_size": s.global_batch,
        "train_micro_batch_size_per_gpu": s.micro_batch,
        "gradient_accumulation_steps": s.num_microbatches(),
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "bf16": { "enabled": s.precision.compute == 2 },
        NOTES: {
            "launch": torchrun(d.world_size()),
            "seq_len": s.seq_len,
            "pipeline_parallel_degree": d.pp,
            "context_parallel_degree": d.cp,
            "expert_parallel_degree": d.ep,
            "recompute": match s.recompute {
                Recompute::None => "none",
                Recompute::Selective | Recompute::SelectiveOp | Recompute::Full => "full",
            },
        },
    });
    if s.precision == BF16_WIDE {
        root["data_types"] = json!({ "grad_accum_dtype": "fp32" });
    }
    if d.tp > 1 {
        root["tensor_parallel"] = json!({ "autotp_size": d.tp });
    }
    root
}

const fn greatest_common_divisor(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        _ => greatest_common_divisor(b, a % b),
    }
}
