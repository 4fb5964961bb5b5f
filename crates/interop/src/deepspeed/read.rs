//! Reads the strategy of a JSON config.

use super::super::{FP16_UNMODELED, FrameworkError, LaunchInfo, OFFLOAD_UNMODELED, ParsedJob};
use super::axes::Axes;
use super::batch::Sizes;
use super::file::File;
use super::zero::{Device, OffloadDevices};
use super::{BF16, BF16_WIDE, FRAMEWORK, NOTES, PIPELINE, fp32, keys, precision, zero};
use trainyard_plan::{Degrees, Offload, Precision, Recompute, Software, Strategy, Synchronization};

pub(in super::super) fn read(text: &str, launch: &LaunchInfo) -> Result<ParsedJob, FrameworkError> {
    read_file(&File::parse(text)?, launch)
}

/// The same for values that another format had.
pub(in super::super) fn read_value(
    root: serde_json::Value,
    launch: &LaunchInfo,
) -> Result<ParsedJob, FrameworkError> {
    read_file(&File::new(root)?, launch)
}

fn read_file(file: &File, launch: &LaunchInfo) -> Result<ParsedJob, FrameworkError> {
    precision::check(file)?;
    let zero_stage = zero::stage(file)?.unwrap_or(0);
    let axes = Axes::read(file)?;
    let sizes = Sizes::read(file)?;
    let ranks = match sizes.ranks()? {
        Some(ranks) => ranks,
        None => FRAMEWORK.left_of(launch.world, &axes.taken())?,
    };
    let batch = sizes.on(ranks)?;
    let seq_len = file.count(&format!("{NOTES}.seq_len"))?.or(launch.seq_len);
    let Some(seq_len) = seq_len else {
        let remedy = "pass it separately, because the training script sets it";
        return Err(FRAMEWORK.unspecified("the sequence length", remedy));
    };
    let is_sharded = zero_stage > 0 || axes.ep > 1;
    let mut unmodeled = Vec::new();
    if sizes.is_open() {
        unmodeled.push(format!(
            "the batch size, which the script sets: micro-batches of {} are assumed",
            batch.micro
        ));
    }
    let strategy = Strategy {
        degrees: Degrees {
            dp_outer: 1,
            pp: axes.pp,
            dp_replicate: if is_sharded { 1 } else { ranks },
            dp_shard: if is_sharded { ranks } else { 1 },
            cp: axes.cp,
            tp: axes.tp,
            ep: axes.ep,
        },
        zero_stage,
        sequence_parallel: false,
        pipeline: PIPELINE,
        global_batch: batch.global,
        micro_batch: batch.micro,
        seq_len,
        recompute: read_recompute(file),
        offload: read_offload(file, &mut unmodeled)?,
        precision: read_precision(file, zero_stage, &mut unmodeled)?,
        synchronization: Synchronization::PLAIN,
        split_points: Vec::new(),
    };
    check(&strategy)?;
    Ok(ParsedJob {
        software: read_software(file, &strategy)?,
        shape: None,
        strategy,
        world: None,
        unmodeled,
    })
}

/// DeepSpeed's behavior with these keys. Flash attention is assumed, because the script chooses the kernel.
fn read_software(file: &File, strategy: &Strategy) -> Result<Software, FrameworkError> {
    let overlap = "zero_optimization.overlap_comm";
    Ok(Software {
        overlaps_data: match file.get(overlap) {
            None => strategy.zero_stage == 3,
            Some(_) => file.flag(overlap)?,
        },
        gradient_on_wire: match file.text("communication_data_type") {
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

fn read_recompute(file: &File) -> Recompute {
    let is_full = file.text(&format!("{NOTES}.recompute")) == Some("full");
    if is_full || keys::asks_for_recomputation(file).is_some() {
        Recompute::Full
    } else {
        Recompute::None
    }
}

/// The planner offloads weights and states to the same device. For anything else it estimates without offloading.
fn read_offload(file: &File, unmodeled: &mut Vec<String>) -> Result<Offload, FrameworkError> {
    let OffloadDevices { states, weights } = OffloadDevices::read(file)?;
    let what = match (states, weights) {
        (Device::None, Device::None) => return Ok(Offload::None),
        (Device::Cpu, Device::Cpu) => return Ok(Offload::Cpu),
        (Device::Nvme, Device::Nvme) => return Ok(Offload::Nvme),
        (_, Device::None) => "offload_optimizer without offload_param",
        (Device::None, _) => "offload_param without offload_optimizer",
        _ => "offload_optimizer and offload_param on different devices",
    };
    unmodeled.push(format!("{what}: {OFFLOAD_UNMODELED}"));
    Ok(Offload::None)
}

fn read_precision(
    file: &File,
    zero_stage: usize,
    unmodeled: &mut Vec<String>,
) -> Result<Precision, FrameworkError> {
    for option in ["bf16_master_weights_and_grads", "bf16_optimizer_states"] {
        if file.flag(&format!("bf16.{option}"))? {
            let why = "the planner models an optimizer with 4-byte states";
            return Err(FRAMEWORK.unsupported(format!("bf16.{option}"), why, "remove it"));
        }
    }
    if precision::is_fp16(file)? {
        unmodeled.push(FP16_UNMODELED.to_owned());
    }
    let wide = file.text("data_types.grad_accum_dtype");
    match (precision::is_narrow(file)?, wide) {
        (false, None | Some("fp32")) => Ok(fp32(zero_stage)),
        (true, None | Some("bf16" | "fp16")) => Ok(BF16),
        (true, Some("fp32")) => Ok(BF16_WIDE),
        (_, Some(other)) => Err(FRAMEWORK.unsupported(
            format!("grad_accum_dtype {other:?}"),
            "the planner accumulates gradients in the type of the weights or in fp32",
            "use \"fp32\" with bf16",
        )),
    }
}
