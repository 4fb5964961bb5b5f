//! DeepSpeed's JSON.
//!
//! It says batches, what is sharded and where it lies, and number types. Pipelines, recomputation, the
//! length of sequences and the model are told to DeepSpeed in the program that trains. So that a file can be
//! read back, they are noted under `"trainyard"`, which DeepSpeed does not look at, and every one that
//! the program must see to is a loss.

use serde_json::{Map, Value, json};
use trainyard_schedule::Kind;

use super::arguments::torchrun;
use super::fit::Fit;
use super::{Choice, Framework, FrameworkError, Read, Told, Written};
use crate::{Degrees, Layers, Offload, Precision, Recompute, Shape, Strategy};

const FRAMEWORK: Framework = Framework::DeepSpeed;

/// The key of what DeepSpeed is told elsewhere.
const NOTES: &str = "trainyard";

/// With `bf16`: the optimiser keeps weights and gradients of four bytes of its own.
const BF16: Precision = Precision {
    compute: 2,
    parameter: 2,
    gradient: 2,
    optimizer: 16,
};

/// With gradients accumulated in four bytes.
const BF16_WIDE: Precision = Precision {
    gradient: 4,
    optimizer: 12,
    ..BF16
};

/// With neither: ZeRO keeps a copy of the weights even where they have the same type.
const fn fp32(zero_stage: usize) -> Precision {
    Precision {
        compute: 4,
        parameter: 4,
        gradient: 4,
        optimizer: if zero_stage == 0 { 8 } else { 12 },
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
    if fit.strategy.recompute == Recompute::Selective {
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
                Recompute::Selective | Recompute::Full => "full",
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

pub(super) fn read(text: &str, told: &Told) -> Result<Read, FrameworkError> {
    let root: Value = serde_json::from_str(text).map_err(|error| FRAMEWORK.syntax(error))?;
    if !root.is_object() {
        return Err(FRAMEWORK.syntax("the whole must be an object"));
    }
    let file = File { root: &root };
    if file.flag("/fp16/enabled")? {
        return Err(FRAMEWORK.refusal(
            "fp16",
            "losses in fp16 are scaled, and a plan knows types by their bytes",
            "use bf16",
        ));
    }
    let zero_stage = file.count("/zero_optimization/stage")?.unwrap_or(0);
    let note = |key: &str| file.count(&format!("/{NOTES}/{key}"));
    let (pp, cp) = (
        note("pipeline_parallel_degree")?.unwrap_or(1),
        note("context_parallel_degree")?.unwrap_or(1),
    );
    let ep = note("expert_parallel_degree")?.unwrap_or(1);
    let tp = file
        .count("/tensor_parallel/autotp_size")?
        .unwrap_or(1)
        .max(1);
    let batch = read_batch(&file, told, &[pp, cp, tp])?;
    let seq_len = note("seq_len")?.or(told.seq_len);
    let Some(seq_len) = seq_len else {
        let remedy = "tell it beside the file, for the program decides it";
        return Err(FRAMEWORK.untold("the length of sequences", remedy));
    };
    let (dp_replicate, dp_shard) = match zero_stage {
        0 => (batch.ranks, 1),
        _ => (1, batch.ranks),
    };
    let strategy = Strategy {
        degrees: Degrees {
            pp,
            dp_replicate: if ep > 1 { 1 } else { dp_replicate },
            dp_shard: if ep > 1 { batch.ranks } else { dp_shard },
            cp,
            tp,
            ep,
        },
        zero_stage,
        sequence_parallel: false,
        layers: LAYERS,
        global_batch: batch.global,
        micro_batch: batch.micro,
        seq_len,
        recompute: match root
            .pointer(&format!("/{NOTES}/recompute"))
            .and_then(Value::as_str)
        {
            Some("full") => Recompute::Full,
            _ => Recompute::None,
        },
        offload: read_offload(&file)?,
        precision: read_precision(&file, zero_stage)?,
    };
    check(&strategy)?;
    Ok(Read {
        shape: None,
        strategy,
        world: None,
    })
}

/// Refuses what DeepSpeed itself refuses when it starts.
fn check(s: &Strategy) -> Result<(), FrameworkError> {
    if s.degrees.pp > 1 && s.zero_stage > 1 {
        return Err(FRAMEWORK.refusal(
            format!("ZeRO stage {} with a pipeline", s.zero_stage),
            "DeepSpeed's pipelines exclude stages 2 and 3",
            "use stage 1",
        ));
    }
    Ok(())
}

/// The file, with typed access by JSON pointers.
struct File<'a> {
    root: &'a Value,
}

impl File<'_> {
    fn count(&self, pointer: &str) -> Result<Option<usize>, FrameworkError> {
        let Some(value) = self.root.pointer(pointer) else {
            return Ok(None);
        };
        if value == "auto" {
            return Err(FRAMEWORK.untold(
                "what \"auto\" stands for",
                format!(
                    "write a number at {pointer}: Hugging Face's Trainer fills it in when it starts"
                ),
            ));
        }
        let number = value
            .as_u64()
            .and_then(|number| usize::try_from(number).ok());
        number
            .map(Some)
            .ok_or_else(|| refused_value(pointer, value, "a whole number"))
    }

    fn flag(&self, pointer: &str) -> Result<bool, FrameworkError> {
        match self.root.pointer(pointer) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) if value == "auto" => Err(FRAMEWORK.untold(
                "what \"auto\" stands for",
                format!("write true or false at {pointer}: Hugging Face's Trainer fills it in"),
            )),
            Some(value) => Err(refused_value(pointer, value, "true or false")),
        }
    }
}

fn refused_value(pointer: &str, value: &Value, expected: &'static str) -> FrameworkError {
    FrameworkError::Value {
        key: pointer.to_owned(),
        value: value.to_string().chars().take(80).collect(),
        expected,
    }
}

/// A step's samples, and who computes them.
struct Batch {
    global: usize,
    micro: usize,
    ranks: usize,
}

/// Any two of DeepSpeed's three sizes give the third where the ranks are known; all three give the ranks.
fn read_batch(file: &File<'_>, told: &Told, taken: &[usize]) -> Result<Batch, FrameworkError> {
    let global = file.count("/train_batch_size")?;
    let micro = file.count("/train_micro_batch_size_per_gpu")?;
    let steps = file.count("/gradient_accumulation_steps")?;
    let uneven = |what: String, why: String| {
        FRAMEWORK.refusal(
            what,
            why,
            "use train_batch_size = micro x accumulation x ranks",
        )
    };
    if let (Some(global), Some(micro), Some(steps)) = (global, micro, steps) {
        let at_once = micro
            .checked_mul(steps)
            .filter(|&n| n > 0 && global.is_multiple_of(n));
        let ranks = at_once.map(|n| global / n).filter(|&ranks| ranks > 0);
        let Some(ranks) = ranks else {
            return Err(uneven(
                format!("train_batch_size {global}"),
                format!("it is no multiple of {micro} x {steps}"),
            ));
        };
        return Ok(Batch {
            global,
            micro,
            ranks,
        });
    }
    let ranks = FRAMEWORK.left_of(told.world, taken)?;
    let (global, micro) = match (global, micro, steps) {
        (Some(global), Some(micro), _) => (global, micro),
        (Some(global), None, steps) => {
            let parts = ranks.checked_mul(steps.unwrap_or(1));
            let parts = parts.filter(|&n| n > 0 && global.is_multiple_of(n));
            let Some(parts) = parts else {
                let why = format!("it is no multiple of {ranks} ranks' accumulated steps");
                return Err(uneven(format!("train_batch_size {global}"), why));
            };
            (global, global / parts)
        }
        (None, Some(micro), steps) => {
            let all = micro
                .checked_mul(ranks)
                .and_then(|n| n.checked_mul(steps.unwrap_or(1)));
            let Some(all) = all else {
                return Err(uneven(
                    format!("micro-batches of {micro}"),
                    "it cannot be counted".to_owned(),
                ));
            };
            (all, micro)
        }
        (None, None, _) => {
            let remedy = "give train_batch_size or train_micro_batch_size_per_gpu";
            return Err(FRAMEWORK.untold("the batch", remedy));
        }
    };
    Ok(Batch {
        global,
        micro,
        ranks,
    })
}

fn read_offload(file: &File<'_>) -> Result<Offload, FrameworkError> {
    let device = |part: &str| {
        let pointer = format!("/zero_optimization/{part}/device");
        let value = file.root.pointer(&pointer).and_then(Value::as_str);
        value.unwrap_or("none")
    };
    match (device("offload_optimizer"), device("offload_param")) {
        ("none", "none") => Ok(Offload::None),
        ("cpu", "cpu") => Ok(Offload::Cpu),
        ("nvme", "nvme") => Ok(Offload::Nvme),
        (states, weights) => Err(FRAMEWORK.refusal(
            format!("the optimiser's states on {states:?}, weights on {weights:?}"),
            "a plan offloads both to the same place",
            "use the same device for offload_optimizer and offload_param, in stage 3",
        )),
    }
}

fn read_precision(file: &File<'_>, zero_stage: usize) -> Result<Precision, FrameworkError> {
    for option in ["bf16_master_weights_and_grads", "bf16_optimizer_states"] {
        if file.flag(&format!("/bf16/{option}"))? {
            let why = "a plan's optimiser keeps four bytes of everything";
            return Err(FRAMEWORK.refusal(format!("bf16.{option}"), why, "remove it"));
        }
    }
    let wide = file
        .root
        .pointer("/data_types/grad_accum_dtype")
        .and_then(Value::as_str);
    match (file.flag("/bf16/enabled")?, wide) {
        (false, None | Some("fp32")) => Ok(fp32(zero_stage)),
        (true, None | Some("bf16")) => Ok(BF16),
        (true, Some("fp32")) => Ok(BF16_WIDE),
        (_, Some(other)) => Err(FRAMEWORK.refusal(
            format!("grad_accum_dtype {other:?}"),
            "a plan accumulates in the type of weights or in four bytes",
            "use \"fp32\" with bf16",
        )),
    }
}
