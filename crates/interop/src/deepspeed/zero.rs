//! The section `zero_optimization`.

use serde_json::Value;

use super::super::{FrameworkError, Outcome};
use super::axes::Axes;
use super::file::{File, invalid, whole};
use super::precision;

const SECTION: &str = "zero_optimization";

/// The ZeRO stage; none if the file has none.
pub(super) fn stage(file: &File) -> Result<Option<usize>, FrameworkError> {
    match file.get(SECTION) {
        // The oldest form.
        Some(Value::Bool(is_on)) => Ok(Some(usize::from(*is_on))),
        _ => file.count("zero_optimization.stage"),
    }
}

/// Where a kind of state is kept.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Device {
    None,
    Cpu,
    Nvme,
}

/// Where optimizer states and weights are kept.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct OffloadDevices {
    pub states: Device,
    pub weights: Device,
}

impl OffloadDevices {
    pub fn read(file: &File) -> Result<OffloadDevices, FrameworkError> {
        let device = |section: &str, old: &str| {
            let key = format!("{SECTION}.{section}.device");
            match file.get(&key) {
                None if file.flag(&format!("{SECTION}.{old}"))? => Ok(Device::Cpu),
                None => Ok(Device::None),
                Some(value) => match value.as_str() {
                    Some("none") => Ok(Device::None),
                    Some("cpu") => Ok(Device::Cpu),
                    Some("nvme") => Ok(Device::Nvme),
                    _ => Err(invalid(&key, value, "\"none\", \"cpu\" or \"nvme\"")),
                },
            }
        };
        let old_param = ["cpu_offload_param", "cpu_offload_params"];
        let is_old = |key: &&str| file.has(&format!("{SECTION}.{key}"));
        let old_param = old_param.into_iter().find(is_old).unwrap_or(old_param[0]);
        Ok(OffloadDevices {
            states: device("offload_optimizer", "cpu_offload")?,
            weights: device("offload_param", old_param)?,
        })
    }

    /// The one device that Trainyard uses: the disk if any of both is there, because it has the room.
    fn device(&self) -> &'static str {
        match (self.states, self.weights) {
            (Device::None, Device::None) => "none",
            (Device::Nvme, _) | (_, Device::Nvme) => "nvme",
            _ => "cpu",
        }
    }

    fn settings(&self) -> Outcome {
        let states = match self.weights {
            Device::None => "optimizer",
            _ => "all",
        };
        let settings = [
            ("parallelism.offload", self.device().to_owned()),
            ("parallelism.offload_states", states.to_owned()),
        ];
        let note = match (self.states, self.weights) {
            (_, Device::None) => "",
            (Device::None, _) => "optimizer states are offloaded too",
            (states, weights) if states != weights => "weights and states are on the same device",
            _ => "",
        };
        Outcome::set_all(settings).with_note(note)
    }
}

pub(super) fn outcome(
    file: &File,
    axes: &Axes,
    key: &str,
    value: &Value,
) -> Result<Option<Outcome>, FrameworkError> {
    if key == SECTION {
        let stage = stage(file)?.ok_or_else(|| invalid(key, value, "a section"))?;
        return Ok(Some(sharding(file, axes, stage)?));
    }
    let Some(name) = key
        .strip_prefix(SECTION)
        .and_then(|rest| rest.strip_prefix('.'))
    else {
        return Ok(None);
    };
    let zero_stage = stage(file)?.unwrap_or(0);
    let devices = OffloadDevices::read(file)?;
    Ok(Some(match name {
        "stage" => {
            let stage = whole(value).ok_or_else(|| invalid(key, value, "a whole number"))?;
            sharding(file, axes, stage)?
        }
        "overlap_comm" => Outcome::set("parallelism.overlap", file.flag(key)?),
        "reduce_bucket_size" => {
            let elements = whole(value).ok_or_else(|| invalid(key, value, "a whole number"))?;
            bucket(zero_stage, elements, precision::gradient_bytes(file)?)
        }
        "mics_shard_size" => Outcome::left("the stage is sharded over so many ranks"),
        "offload_optimizer.device" | "cpu_offload" if devices.states != Device::None => {
            devices.settings()
        }
        "offload_param.device" | "cpu_offload_param" | "cpu_offload_params"
            if devices.weights != Device::None =>
        {
            match devices.states {
                Device::None => devices.settings(),
                _ => Outcome::left("weights are offloaded with the optimizer states"),
            }
        }
        "offload_optimizer.device"
        | "offload_param.device"
        | "cpu_offload"
        | "cpu_offload_param"
        | "cpu_offload_params" => Outcome::ignored("it is off"),
        "offload_optimizer.nvme_path" | "offload_param.nvme_path" => folder(&devices, name, value),
        name => return Ok(without_counterpart(name, value)),
    }))
}

fn sharding(file: &File, axes: &Axes, stage: usize) -> Result<Outcome, FrameworkError> {
    let degree = |replicate: &str, shard: String| {
        vec![
            (
                "parallelism.data_parallel_replicate_degree",
                replicate.to_owned(),
            ),
            ("parallelism.data_parallel_shard_degree", shard),
        ]
    };
    if stage == 0 && axes.ep == 1 {
        return Ok(Outcome::set_all(degree("-1", "1".to_owned())));
    }
    let group = match file.number("zero_optimization.mics_shard_size")? {
        Some(_) if stage == 0 => None,
        Some(ranks) if ranks > 0.0 => file.count("zero_optimization.mics_shard_size")?,
        _ => None,
    };
    let mut settings = vec![("parallelism.zero_stage", stage.to_string())];
    settings.extend(match group {
        Some(ranks) => degree("-1", ranks.to_string()),
        None => degree("1", "-1".to_owned()),
    });
    Ok(Outcome::set_all(settings))
}

/// DeepSpeed counts elements, Trainyard bytes.
fn bucket(zero_stage: usize, elements: usize, bytes: usize) -> Outcome {
    let size = elements.saturating_mul(bytes);
    let note = format!("{elements} gradients of {bytes} bytes");
    match zero_stage {
        0 => {
            let mebibytes = size as f64 / f64::from(1 << 20);
            Outcome::set("parallelism.bucket_cap_mb", mebibytes).with_note(note)
        }
        1 | 2 => Outcome::set("parallelism.reduce_bucket_size", size).with_note(note),
        _ => Outcome::ignored(
            "it changes speed and memory only; stage 3 gathers and reduces unit by unit, and \
             parallelism.reduce_bucket_size would merge units",
        ),
    }
}

fn folder(devices: &OffloadDevices, name: &str, value: &Value) -> Outcome {
    let is_states = name.starts_with("offload_optimizer");
    let own = if is_states {
        devices.states
    } else {
        devices.weights
    };
    match (value.as_str(), own) {
        (Some(path), Device::Nvme) if is_states || devices.states != Device::Nvme => {
            Outcome::set("parallelism.offload_folder", path)
        }
        (_, Device::Nvme) => Outcome::left("offload_optimizer.nvme_path is the folder of both"),
        _ => Outcome::ignored("nothing is offloaded to NVMe"),
    }
}

/// Keys that change speed or memory only, and where Trainyard has something similar.
const SPEED: [(&str, &str); 32] = [
    (
        "contiguous_gradients",
        "flat parameters are contiguous anyway",
    ),
    ("reduce_scatter", "ZeRO always reduces by reduce-scatter"),
    ("allgather_partitions", "ZeRO always gathers by all-gather"),
    (
        "allgather_bucket_size",
        "parameters are gathered by unit, or as parallelism.reduce_bucket_size merges units",
    ),
    (
        "use_multi_rank_bucket_allreduce",
        "buckets are reduced one by one",
    ),
    ("round_robin_gradients", "every rank copies its own shard"),
    ("sub_group_size", "the optimizer updates unit by unit"),
    (
        "stage3_prefetch_bucket_size",
        "parallelism.fsdp_prefetch counts units that are gathered ahead",
    ),
    (
        "prefetch_bucket_size",
        "parallelism.fsdp_prefetch counts units that are gathered ahead",
    ),
    (
        "stage3_param_persistence_threshold",
        "every parameter is sharded, small ones too",
    ),
    (
        "stage3_model_persistence_threshold",
        "every parameter is sharded, small ones too",
    ),
    (
        "stage3_max_live_parameters",
        "parallelism.fsdp_reshard_after_forward decides which units stay gathered",
    ),
    (
        "stage3_max_reuse_distance",
        "parallelism.fsdp_reshard_after_forward decides which units stay gathered",
    ),
    (
        "stage3_gather_16bit_weights_on_model_save",
        "checkpoints are sharded, and `trainyard ckpt` exports them",
    ),
    (
        "stage3_gather_fp16_weights_on_model_save",
        "checkpoints are sharded, and `trainyard ckpt` exports them",
    ),
    (
        "stage3_module_granularity_threshold",
        "units are gathered as wholes",
    ),
    (
        "stage3_use_all_reduce_for_fetch_params",
        "parameters are gathered by all-gather",
    ),
    (
        "stage3_allgather_sequential",
        "units are gathered as wholes",
    ),
    (
        "stage3_partition_stream_chunk_size",
        "a rank creates its shards only",
    ),
    (
        "zero_hpz_partition_size",
        "there is no second copy of shards within a node",
    ),
    (
        "mics_hierarchical_params_gather",
        "shards are gathered in one step",
    ),
    ("memory_efficient_linear", "it is PyTorch's workaround"),
    (
        "elastic_checkpoint",
        "every checkpoint can be loaded on other numbers of ranks",
    ),
    (
        "load_from_fp32_weights",
        "checkpoints contain the weights in training.dtype",
    ),
    (
        "pipeline_loading_checkpoint",
        "ranks read their own parts of a checkpoint",
    ),
    (
        "ignore_unused_parameters",
        "with ZeRO every parameter has a gradient",
    ),
    ("legacy_stage1", "there is one stage 1"),
    ("override_module_apply", "it is about Python modules"),
    (
        "log_trace_cache_warnings",
        "it is a log message of DeepSpeed",
    ),
    ("enable_sanity_checks", "value_guard checks values"),
    (
        "cpu_offload_use_pin_memory",
        "offloaded states are in files of the memory file system",
    ),
    (
        "save_muon_momentum_buffer_in_memory",
        "all states are offloaded alike",
    ),
];

/// Keys that change the result if they are on.
const RESULT: [(&str, &str); 5] = [
    (
        "zero_quantized_weights",
        "weights travel in the type of computation",
    ),
    (
        "zero_quantized_nontrainable_weights",
        "weights are kept in training.dtype",
    ),
    (
        "zero_quantized_gradients",
        "gradients travel in training.mixed_precision_reduce",
    ),
    (
        "zeropp_loco_param",
        "gradients travel in training.mixed_precision_reduce",
    ),
    ("zenflow", "every update uses all gradients of its step"),
];

fn without_counterpart(name: &str, value: &Value) -> Option<Outcome> {
    if name.starts_with("offload_optimizer.") || name.starts_with("offload_param.") {
        return Some(Outcome::ignored(
            "it changes speed only; Trainyard chooses its buffers itself",
        ));
    }
    if name.starts_with("leaf_module.") {
        return Some(Outcome::ignored("a unit is one block of the model"));
    }
    if let Some((_, reason)) = SPEED.iter().find(|(known, _)| *known == name) {
        return Some(Outcome::ignored(*reason));
    }
    let section = name.split('.').next().unwrap_or(name);
    let (_, reason) = RESULT.iter().find(|(known, _)| *known == section)?;
    Some(match value {
        Value::Bool(false) => Outcome::ignored("it is off"),
        _ => Outcome::rejected(*reason, "remove it"),
    })
}

/// The names of all keys, to suggest one for an unknown key.
pub(super) fn known() -> impl Iterator<Item = String> {
    let own = [
        "stage",
        "overlap_comm",
        "reduce_bucket_size",
        "offload_optimizer",
        "offload_param",
    ];
    let names = own.into_iter().chain(SPEED.iter().map(|(name, _)| *name));
    names.map(|name| format!("{SECTION}.{name}"))
}
