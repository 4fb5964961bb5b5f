//! DeepSpeed's JSON.
//!
//! It says batches, what is sharded and where it lies, and number types. Pipelines, recomputation, the
//! length of sequences and the model are told to DeepSpeed in the program that trains. So that a file can be
//! read back, they are noted under `"trainyard"`, which DeepSpeed does not look at, and every one that
//! the program must see to is a loss.

mod read;

use serde_json::{Map, Value, json};
use trainyard_schedule::Kind;

use super::arguments::torchrun;
use super::fit::Fit;
use super::{Choice, Framework, FrameworkError, Written};
use crate::{Layers, Offload, Precision, Recompute, Shape, Strategy};
pub(super) use read::read;

const FRAMEWORK: Framework = Framework::DeepSpeed;

/// The key of what DeepSpeed is told elsewhere.
const NOTES: &str = "trainyard";

/// With `bf16`: the optimiser keeps weights and gradients of four bytes of its own.
const BF16: Precision = Precision {
    compute: 2,
    parameter: 2,
    gradient: 2,
    reduced: 2,
    optimizer: 16,
};

/// With gradients accumulated in four bytes.
const BF16_WIDE: Precision = Precision {
    gradient: 4,
    reduced: 4,
    optimizer: 12,
    ..BF16
};

/// With neither: ZeRO keeps a copy of the weights even where they have the same type.
const fn fp32(zero_stage: usize) -> Precision {
    Precision {
        optimizer: if zero_stage == 0 { 8 } else { 12 },
        ..Precision::FP32
    }
}

const LAYERS: Layers = Layers {
    schedule: Kind::OneForwardOneBackward,
    stages_per_rank: 1,
};

pub(super) fn write(shape: &Shape, strategy: &Strategy) -> Result<Written, FrameworkError> {
    let mut fit = Fit::new(shape, strategy);
    fit_offload(&mut fit);
    fit_sharding(&mut fit);
    fit_rest(&mut fit);
    note_elsewhere(&mut fit);
    let text = serde_json::to_string_pretty(&json_of(&fit.strategy));
    Ok(Written {
        text: text.map_err(|error| FRAMEWORK.syntax(error))? + "\n",
        losses: fit.losses,
    })
}

fn fit_offload(fit: &mut Fit) {
    let s = &fit.strategy;
    if s.offload == Offload::None || s.zero_stage == 3 {
        return;
    }
    let why = "weights are offloaded in stage 3 only";
    match s.degrees.pp {
        1 => fit.change(Choice::ZeroStage, why, "stage 3", |s| s.zero_stage = 3),
        _ => fit.change(
            Choice::Offload,
            format!("{why}, which excludes pipelines"),
            "no offloading",
            |s| s.offload = Offload::None,
        ),
    }
}

fn fit_sharding(fit: &mut Fit) {
    let s = &fit.strategy;
    if s.degrees.pp > 1 && s.zero_stage > 1 {
        if s.offload != Offload::None {
            let why = "weights are offloaded in stage 3 only, which excludes pipelines";
            fit.change(Choice::Offload, why, "no offloading", |s| {
                s.offload = Offload::None
            });
        }
        let why = "stages 2 and 3 exclude pipelines";
        fit.change(Choice::ZeroStage, why, "stage 1", |s| s.zero_stage = 1);
    }
    let d = &fit.strategy.degrees;
    if fit.strategy.zero_stage > 0 && d.dp_replicate > 1 {
        let why = "states are sharded over all data-parallel ranks";
        let written = format!("{} shards", d.data_parallel());
        fit.change(Choice::DataParallel, why, written, |s| {
            s.degrees.dp_shard = s.degrees.data_parallel();
            s.degrees.dp_replicate = 1;
        });
    }
    let d = &fit.strategy.degrees;
    let over_data = greatest_common_divisor(d.ep, d.data_parallel());
    if over_data != d.ep {
        let why = "experts are laid over data-parallel ranks only";
        let written = format!("{over_data} ranks that share them");
        fit.change(Choice::ExpertParallel, why, written, |s| {
            s.degrees.ep = over_data
        });
    }
}

fn fit_rest(fit: &mut Fit) {
    if fit.strategy.sequence_parallel {
        let why = "its tensor parallelism leaves positions whole";
        fit.change(Choice::SequenceParallel, why, "none", |s| {
            s.sequence_parallel = false
        });
    }
    if fit.strategy.layers != LAYERS {
        let why = "its pipelines know 1F1B only";
        fit.change(Choice::Schedule, why, "1F1B", |s| s.layers = LAYERS);
    }
    if matches!(
        fit.strategy.recompute,
        Recompute::Selective | Recompute::Products
    ) {
        let why = "it recomputes what the program marks, and has no choice by parts";
        fit.change(Choice::Recompute, why, "every block", |s| {
            s.recompute = Recompute::Full
        });
    }
    let offered = [BF16, BF16_WIDE, fp32(fit.strategy.zero_stage)];
    fit.choose_precision(
        &offered,
        "weights have a copy of their own beside the optimiser's",
    );
}

/// What the program must be told.
fn note_elsewhere(fit: &mut Fit) {
    let (d, recompute, seq_len) = (
        fit.strategy.degrees,
        fit.strategy.recompute,
        fit.strategy.seq_len,
    );
    let outside = "its JSON does not say it";
    fit.elsewhere(Choice::Model, outside, "give the program the model");
    fit.elsewhere(
        Choice::SequenceLength,
        outside,
        format!("give the program samples of {seq_len} tokens"),
    );
    if d.pp > 1 {
        let how = format!("deepspeed.pipe.PipelineModule(..., num_stages={})", d.pp);
        fit.elsewhere(Choice::PipelineParallel, outside, how);
    }
    if d.cp > 1 {
        let how = format!("Ulysses: DistributedAttention over a group of {}", d.cp);
        fit.elsewhere(Choice::ContextParallel, outside, how);
    }
    if d.ep > 1 {
        let how = format!("deepspeed.moe.layer.MoE(..., ep_size={})", d.ep);
        fit.elsewhere(Choice::ExpertParallel, outside, how);
    }
    if recompute == Recompute::Full {
        let how = "model.gradient_checkpointing_enable(), or deepspeed.checkpointing.checkpoint around every block";
        fit.elsewhere(Choice::Recompute, outside, how);
    }
}

fn json_of(s: &Strategy) -> Value {
    let d = &s.degrees;
    let mut zero = Map::new();
    zero.insert("stage".to_owned(), json!(s.zero_stage));
    if s.zero_stage > 0 && s.degrees.pp == 1 {
        // As the plan is priced; only stage 3 does it unasked.
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
                Recompute::Selective | Recompute::Products | Recompute::Full => "full",
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
