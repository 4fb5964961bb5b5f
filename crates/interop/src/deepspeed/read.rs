//! Reads the JSON config of DeepSpeed.

use serde_json::Value;

use super::super::{FrameworkError, LaunchInfo, ParsedJob};
use super::{BF16, BF16_WIDE, FRAMEWORK, NOTES, PIPELINE, fp32};
use trainyard_plan::{Degrees, Offload, Precision, Recompute, Software, Strategy};

pub(in super::super) fn read(text: &str, launch: &LaunchInfo) -> Result<ParsedJob, FrameworkError> {
    let root: Value = serde_json::from_str(text).map_err(|error| FRAMEWORK.syntax(error))?;
    if !root.is_object() {
        return Err(FRAMEWORK.syntax("the top level must be an object"));
    }
    let file = File { root: &root };
    if file.flag("/fp16/enabled")? {
        return Err(FRAMEWORK.unsupported(
            "fp16",
            "fp16 needs loss scaling, which the planner does not model",
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
    let batch = read_batch(&file, launch, &[pp, cp, tp])?;
    let seq_len = note("seq_len")?.or(launch.seq_len);
    let Some(seq_len) = seq_len else {
        let remedy = "pass it separately, because the training script sets it";
        return Err(FRAMEWORK.unspecified("the sequence length", remedy));
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
        pipeline: PIPELINE,
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
    Ok(ParsedJob {
        software: read_software(&file, &strategy)?,
        shape: None,
        strategy,
        world: None,
    })
}

/// DeepSpeed's behavior with these keys. Flash attention is assumed, because the script chooses the kernel.
fn read_software(file: &File<'_>, strategy: &Strategy) -> Result<Software, FrameworkError> {
    let overlap = "/zero_optimization/overlap_comm";
    let reduce_dtype = file.root.pointer("/communication_data_type");
    Ok(Software {
        overlaps_data: match file.root.pointer(overlap) {
            None | Some(Value::Null) => strategy.zero_stage == 3,
            Some(_) => file.flag(overlap)?,
        },
        gradient_on_wire: match reduce_dtype.and_then(Value::as_str) {
            Some("fp32") => 4,
            Some(_) => 2,
            None => strategy.precision.compute,
        },
        ..Software::MODERN
    })
}

/// Rejects what DeepSpeed itself rejects at startup.
fn check(s: &Strategy) -> Result<(), FrameworkError> {
    if s.degrees.pp > 1 && s.zero_stage > 1 {
        return Err(FRAMEWORK.unsupported(
            format!("ZeRO stage {} with a pipeline", s.zero_stage),
            "DeepSpeed's pipelines do not support stages 2 and 3",
            "use stage 1",
        ));
    }
    Ok(())
}

/// The parsed file, with typed access by JSON pointer.
struct File<'a> {
    root: &'a Value,
}

impl File<'_> {
    fn count(&self, pointer: &str) -> Result<Option<usize>, FrameworkError> {
        let Some(value) = self.root.pointer(pointer) else {
            return Ok(None);
        };
        if value == "auto" {
            return Err(FRAMEWORK.unspecified(
                "the value of \"auto\"",
                format!(
                    "write a number at {pointer}: Hugging Face's Trainer fills it in at startup"
                ),
            ));
        }
        let number = value
            .as_u64()
            .and_then(|number| usize::try_from(number).ok());
        number
            .map(Some)
            .ok_or_else(|| unsupported_value(pointer, value, "a whole number"))
    }

    fn flag(&self, pointer: &str) -> Result<bool, FrameworkError> {
        match self.root.pointer(pointer) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) if value == "auto" => Err(FRAMEWORK.unspecified(
                "the value of \"auto\"",
                format!("write true or false at {pointer}: Hugging Face's Trainer fills it in at startup"),
            )),
            Some(value) => Err(unsupported_value(pointer, value, "true or false")),
        }
    }
}

fn unsupported_value(pointer: &str, value: &Value, expected: &'static str) -> FrameworkError {
    FrameworkError::Value {
        key: pointer.to_owned(),
        value: value.to_string().chars().take(80).collect(),
        expected,
    }
}

/// The batch sizes, and the number of data-parallel ranks.
struct Batch {
    global: usize,
    micro: usize,
    ranks: usize,
}

/// Any two of DeepSpeed's three sizes give the third if the number of ranks is known; all three give the ranks.
fn read_batch(
    file: &File<'_>,
    launch: &LaunchInfo,
    taken: &[usize],
) -> Result<Batch, FrameworkError> {
    let global = file.count("/train_batch_size")?;
    let micro = file.count("/train_micro_batch_size_per_gpu")?;
    let steps = file.count("/gradient_accumulation_steps")?;
    let uneven = |what: String, why: String| {
        FRAMEWORK.unsupported(
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
                format!("it is not a multiple of {micro} x {steps}"),
            ));
        };
        return Ok(Batch {
            global,
            micro,
            ranks,
        });
    }
    let ranks = FRAMEWORK.left_of(launch.world, taken)?;
    let (global, micro) = match (global, micro, steps) {
        (Some(global), Some(micro), _) => (global, micro),
        (Some(global), None, steps) => {
            let num_microbatches = ranks.checked_mul(steps.unwrap_or(1));
            let num_microbatches = num_microbatches.filter(|&n| n > 0 && global.is_multiple_of(n));
            let Some(num_microbatches) = num_microbatches else {
                let why = format!(
                    "it is not a multiple of the data-parallel ranks, {ranks}, x the accumulation steps"
                );
                return Err(uneven(format!("train_batch_size {global}"), why));
            };
            (global, global / num_microbatches)
        }
        (None, Some(micro), steps) => {
            let all = micro
                .checked_mul(ranks)
                .and_then(|n| n.checked_mul(steps.unwrap_or(1)));
            let Some(all) = all else {
                return Err(uneven(
                    format!("micro-batches of {micro}"),
                    "the global batch would be too large".to_owned(),
                ));
            };
            (all, micro)
        }
        (None, None, _) => {
            let remedy = "give train_batch_size or train_micro_batch_size_per_gpu";
            return Err(FRAMEWORK.unspecified("the batch size", remedy));
        }
    };
    Ok(Batch {
        global,
        micro,
        ranks,
    })
}

fn read_offload(file: &File<'_>) -> Result<Offload, FrameworkError> {
    let device = |section: &str| {
        let pointer = format!("/zero_optimization/{section}/device");
        let value = file.root.pointer(&pointer).and_then(Value::as_str);
        value.unwrap_or("none")
    };
    match (device("offload_optimizer"), device("offload_param")) {
        ("none", "none") => Ok(Offload::None),
        ("cpu", "cpu") => Ok(Offload::Cpu),
        ("nvme", "nvme") => Ok(Offload::Nvme),
        (states, weights) => Err(FRAMEWORK.unsupported(
            format!("optimizer states on {states:?}, weights on {weights:?}"),
            "the planner offloads both to the same device",
            "use the same device for offload_optimizer and offload_param, in stage 3",
        )),
    }
}

fn read_precision(file: &File<'_>, zero_stage: usize) -> Result<Precision, FrameworkError> {
    for option in ["bf16_master_weights_and_grads", "bf16_optimizer_states"] {
        if file.flag(&format!("/bf16/{option}"))? {
            let why = "the planner models an optimizer with 4-byte states";
            return Err(FRAMEWORK.unsupported(format!("bf16.{option}"), why, "remove it"));
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
        (_, Some(other)) => Err(FRAMEWORK.unsupported(
            format!("grad_accum_dtype {other:?}"),
            "the planner accumulates gradients in the type of the weights or in fp32",
            "use \"fp32\" with bf16",
        )),
    }
}
