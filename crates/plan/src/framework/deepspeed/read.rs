//! What DeepSpeed's JSON says.

use serde_json::Value;

use super::super::{FrameworkError, Read, Told};
use super::{BF16, BF16_WIDE, FRAMEWORK, LAYERS, NOTES, fp32};
use crate::{Degrees, Offload, Precision, Recompute, Software, Strategy};

pub(in super::super) fn read(text: &str, told: &Told) -> Result<Read, FrameworkError> {
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
        software: read_software(&file, &strategy)?,
        shape: None,
        strategy,
        world: None,
    })
}

/// What DeepSpeed does with these keys; attention is the program's, and taken to be as it is today.
fn read_software(file: &File<'_>, strategy: &Strategy) -> Result<Software, FrameworkError> {
    let overlap = "/zero_optimization/overlap_comm";
    let travels = file.root.pointer("/communication_data_type");
    Ok(Software {
        overlaps_data: match file.root.pointer(overlap) {
            None | Some(Value::Null) => strategy.zero_stage == 3,
            Some(_) => file.flag(overlap)?,
        },
        gradient_on_wire: match travels.and_then(Value::as_str) {
            Some("fp32") => 4,
            Some(_) => 2,
            None => strategy.precision.compute,
        },
        ..Software::MODERN
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
