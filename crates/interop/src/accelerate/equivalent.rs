//! What each key means: a setting that DeepSpeed has too, or something of its own.

use serde_json::{Value, json};

use super::super::deepspeed::{File, invalid, whole};
use super::super::suggest::suggestion;
use super::super::{FrameworkError, Outcome};

/// What a key means.
pub(super) enum Equivalent {
    /// The same as these keys of a DeepSpeed config.
    DeepSpeed(Vec<(&'static str, Value)>),
    /// Something that DeepSpeed's config does not have.
    Trainyard(Outcome),
}

/// Keys that are about starting processes, or about other hardware.
const LAUNCHER: [&str; 22] = [
    "compute_environment",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "gpu_ids",
    "enable_cpu_affinity",
    "tpu_name",
    "tpu_zone",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "tpu_vm",
    "tpu_env",
    "command_file",
    "commands",
    "downcast_bf16",
    "debug",
    "deepspeed_hostfile",
    "deepspeed_multinode_launcher",
    "use_cpu",
];

/// Keys of plugins that change speed, memory or files only.
const WITHOUT_EFFECT: [(&str, &str); 20] = [
    ("zero3_init_flag", "a rank creates its shards only"),
    (
        "zero3_save_16bit_model",
        "checkpoints are sharded, and `trainyard ckpt` exports them",
    ),
    (
        "deepspeed_moe_layer_cls_names",
        "a unit is one block of the model",
    ),
    (
        "deepspeed_exclusion_filter",
        "`trainyard run` starts the ranks",
    ),
    (
        "deepspeed_inclusion_filter",
        "`trainyard run` starts the ranks",
    ),
    ("fsdp_version", "there is one implementation, like FSDP2"),
    ("fsdp_auto_wrap_policy", "a unit is one block of the model"),
    (
        "fsdp_transformer_layer_cls_to_wrap",
        "a unit is one block of the model",
    ),
    ("fsdp_min_num_params", "a unit is one block of the model"),
    (
        "fsdp_backward_prefetch",
        "parallelism.fsdp_prefetch counts units that are gathered ahead",
    ),
    (
        "fsdp_backward_prefetch_policy",
        "parallelism.fsdp_prefetch counts units that are gathered ahead",
    ),
    (
        "fsdp_forward_prefetch",
        "parallelism.fsdp_prefetch counts units that are gathered ahead",
    ),
    (
        "fsdp_state_dict_type",
        "checkpoints are sharded, and `trainyard ckpt` exports them",
    ),
    (
        "fsdp_sync_module_states",
        "all ranks create the same weights",
    ),
    (
        "fsdp_use_orig_params",
        "there is one kind of flat parameters",
    ),
    (
        "fsdp_cpu_ram_efficient_loading",
        "a rank reads its shards only",
    ),
    ("fsdp_ignored_modules", "every parameter is sharded"),
    ("dynamo_config", "Trainyard does not compile models"),
    ("mpirun_config", "`trainyard run` starts the ranks"),
    ("ipex_config", "it is about another library"),
];

const STAGE: &str = "zero_optimization.stage";

pub(super) fn equivalent(
    file: &File,
    key: &str,
    value: &Value,
) -> Result<Equivalent, FrameworkError> {
    let name = key.rsplit('.').next().unwrap_or(key);
    let section = key.split('.').next().unwrap_or(key);
    let own = Equivalent::Trainyard;
    if value.is_null() {
        return Ok(own(Outcome::left("null sets nothing")));
    }
    Ok(match (section, name) {
        ("distributed_type", _) => own(Outcome::left("the other keys describe it")),
        ("num_processes" | "num_machines", _) => own(Outcome::left(
            "`trainyard run --nnodes N --nproc-per-node M` starts the ranks",
        )),
        ("mixed_precision", _) => mixed_precision(value),
        (_, "gradient_accumulation_steps") => own(accumulation(key, value)?),
        ("deepspeed_config", name) => match deepspeed(name) {
            Some("") => own(Outcome::rejected(
                "the settings are in that file",
                "use it itself, as in `trainyard train model.toml --from FILE.json`",
            )),
            Some(path) => Equivalent::DeepSpeed(vec![(path, value.clone())]),
            None => own(without_counterpart(key, name)),
        },
        ("fsdp_config", name) => fsdp(file, key, name, value)?,
        ("megatron_lm_config", name) => megatron(key, name, value)?,
        ("parallelism_config" | "tp_config", name) => parallelism(file, key, name, value)?,
        ("fp8_config", _) => own(Outcome::rejected(
            "8-bit types are not implemented",
            "use mixed_precision: bf16",
        )),
        _ => own(without_counterpart(key, name)),
    })
}

fn mixed_precision(value: &Value) -> Equivalent {
    match value.as_str() {
        Some("fp16") => Equivalent::DeepSpeed(vec![("fp16.enabled", json!(true))]),
        Some("bf16") => Equivalent::DeepSpeed(vec![("bf16.enabled", json!(true))]),
        Some("no") => Equivalent::Trainyard(Outcome::set_all([
            ("training.dtype", "float32".to_owned()),
            ("training.mixed_precision_param", "float32".to_owned()),
        ])),
        _ => Equivalent::Trainyard(Outcome::rejected(
            "layers compute in float32, bfloat16 or float16",
            "use no, bf16 or fp16",
        )),
    }
}

/// The script sets the size of a micro-batch.
fn accumulation(key: &str, value: &Value) -> Result<Outcome, FrameworkError> {
    if value == "auto" || whole(value) == Some(1) {
        return Ok(Outcome::left("Trainyard's own batch sizes apply"));
    }
    let steps = whole(value).ok_or_else(|| invalid(key, value, "a whole number"))?;
    Ok(Outcome::rejected(
        "Trainyard has no number of accumulation steps: it follows from the batch sizes",
        format!(
            "pass --training.global_batch_size, {steps} x training.local_batch_size x data-parallel ranks, and \
             --ignore {key}"
        ),
    ))
}

/// The key of DeepSpeed's own config; an empty one if the value is the name of such a config.
fn deepspeed(name: &str) -> Option<&'static str> {
    Some(match name {
        "deepspeed_config_file" => "",
        "zero_stage" => STAGE,
        "gradient_clipping" => "gradient_clipping",
        "offload_optimizer_device" => "zero_optimization.offload_optimizer.device",
        "offload_param_device" => "zero_optimization.offload_param.device",
        "offload_optimizer_nvme_path" => "zero_optimization.offload_optimizer.nvme_path",
        "offload_param_nvme_path" => "zero_optimization.offload_param.nvme_path",
        _ => return None,
    })
}

fn fsdp(file: &File, key: &str, name: &str, value: &Value) -> Result<Equivalent, FrameworkError> {
    let stage = |stage: usize| vec![(STAGE, json!(stage))];
    let strategy = value
        .as_str()
        .map(str::to_ascii_uppercase)
        .unwrap_or_default();
    Ok(match (name, strategy.as_str(), value) {
        ("fsdp_sharding_strategy" | "fsdp_reshard_after_forward", "FULL_SHARD" | "1", _) => {
            Equivalent::DeepSpeed(stage(3))
        }
        ("fsdp_sharding_strategy" | "fsdp_reshard_after_forward", "SHARD_GRAD_OP" | "2", _) => {
            Equivalent::DeepSpeed(stage(2))
        }
        ("fsdp_sharding_strategy" | "fsdp_reshard_after_forward", "NO_SHARD" | "3", _) => {
            Equivalent::DeepSpeed(stage(0))
        }
        ("fsdp_sharding_strategy", "HYBRID_SHARD" | "HYBRID_SHARD_ZERO2" | "4" | "5", _) => {
            let is_zero2 = matches!(strategy.as_str(), "HYBRID_SHARD_ZERO2" | "5");
            hybrid(file, if is_zero2 { 2 } else { 3 })?
        }
        ("fsdp_sharding_strategy", _, Value::Number(number)) => match number.as_u64() {
            Some(1) => Equivalent::DeepSpeed(stage(3)),
            Some(2) => Equivalent::DeepSpeed(stage(2)),
            Some(3) => Equivalent::DeepSpeed(stage(0)),
            Some(4) => hybrid(file, 3)?,
            Some(5) => hybrid(file, 2)?,
            _ => return Err(invalid(key, value, "a sharding strategy of FSDP")),
        },
        ("fsdp_reshard_after_forward", _, Value::Bool(true)) => Equivalent::DeepSpeed(stage(3)),
        ("fsdp_reshard_after_forward", _, Value::Bool(false)) => Equivalent::DeepSpeed(stage(2)),
        ("fsdp_sharding_strategy" | "fsdp_reshard_after_forward", ..) => {
            return Err(invalid(key, value, "a sharding strategy of FSDP"));
        }
        ("fsdp_offload_params", _, Value::Bool(true)) => Equivalent::DeepSpeed(vec![
            ("zero_optimization.offload_optimizer.device", json!("cpu")),
            ("zero_optimization.offload_param.device", json!("cpu")),
        ]),
        ("fsdp_offload_params", ..) => Equivalent::Trainyard(Outcome::ignored("it is off")),
        ("fsdp_activation_checkpointing", _, Value::Bool(true)) => {
            Equivalent::DeepSpeed(vec![("trainyard.recompute", json!("full"))])
        }
        ("fsdp_activation_checkpointing", ..) => {
            Equivalent::DeepSpeed(vec![("trainyard.recompute", json!("none"))])
        }
        _ => Equivalent::Trainyard(without_counterpart(key, name)),
    })
}

/// Shards within a node, replicas across nodes.
fn hybrid(file: &File, stage: usize) -> Result<Equivalent, FrameworkError> {
    let processes = file.count("num_processes")?.unwrap_or(1);
    let nodes = file.count("num_machines")?.unwrap_or(1).max(1);
    Ok(Equivalent::DeepSpeed(vec![
        (STAGE, json!(stage)),
        (
            "zero_optimization.mics_shard_size",
            json!((processes / nodes).max(1)),
        ),
    ]))
}

fn megatron(key: &str, name: &str, value: &Value) -> Result<Equivalent, FrameworkError> {
    let flag = || {
        value
            .as_bool()
            .ok_or_else(|| invalid(key, value, "true or false"))
    };
    let own = Equivalent::Trainyard;
    Ok(match name {
        "megatron_lm_tp_degree" => {
            Equivalent::DeepSpeed(vec![("tensor_parallel.autotp_size", value.clone())])
        }
        "megatron_lm_pp_degree" => Equivalent::DeepSpeed(vec![("pipeline.stages", value.clone())]),
        "megatron_lm_gradient_clipping" => {
            Equivalent::DeepSpeed(vec![("gradient_clipping", value.clone())])
        }
        "megatron_lm_use_distributed_optimizer" => {
            Equivalent::DeepSpeed(vec![(STAGE, json!(usize::from(flag()?)))])
        }
        "megatron_lm_sequence_parallelism" => own(Outcome::set(
            "parallelism.enable_sequence_parallel",
            flag()?,
        )),
        "megatron_lm_recompute_activations" => own(Outcome::set(
            "activation_checkpoint.mode",
            if flag()? { "selective" } else { "none" },
        )),
        "megatron_lm_num_micro_batches" => own(accumulation(key, value)?),
        _ => own(without_counterpart(key, name)),
    })
}

fn parallelism(
    file: &File,
    key: &str,
    name: &str,
    value: &Value,
) -> Result<Equivalent, FrameworkError> {
    let count = || whole(value).ok_or_else(|| invalid(key, value, "a whole number"));
    let name = name.strip_prefix("parallelism_config_").unwrap_or(name);
    let own = Equivalent::Trainyard;
    Ok(match name {
        "dp_replicate_size" => own(Outcome::set(
            "parallelism.data_parallel_replicate_degree",
            count()?,
        )),
        "dp_shard_size" => {
            let size = count()?;
            let mut settings = vec![("parallelism.data_parallel_shard_degree", size.to_string())];
            if !file.has("fsdp_config.fsdp_reshard_after_forward") && size > 1 {
                settings.push(("parallelism.zero_stage", "3".to_owned()));
            }
            own(Outcome::set_all(settings))
        }
        "tp_size" => Equivalent::DeepSpeed(vec![("tensor_parallel.autotp_size", value.clone())]),
        "cp_size" => {
            Equivalent::DeepSpeed(vec![("trainyard.context_parallel_degree", value.clone())])
        }
        "sp_size" => Equivalent::DeepSpeed(vec![("sequence_parallel_size", value.clone())]),
        "cp_comm_strategy" | "sp_backend" | "cp_backend" => own(Outcome::ignored(
            "it changes speed only; parallelism.context_parallel_method chooses ring or ulysses",
        )),
        name => own(without_counterpart(key, name)),
    })
}

/// The number of replicas that the file states.
pub(super) fn replicate_degree(file: &File) -> Result<Option<usize>, FrameworkError> {
    let mut degree = None;
    for name in ["parallelism_config_dp_replicate_size", "dp_replicate_size"] {
        degree = degree.or(file.count(&format!("parallelism_config.{name}"))?);
    }
    let strategy = file.text("fsdp_config.fsdp_sharding_strategy");
    if strategy.is_some_and(|name| name.to_ascii_uppercase().starts_with("HYBRID")) {
        degree = degree.or(file.count("num_machines")?);
    }
    Ok(degree.filter(|&degree| degree > 0))
}

fn without_counterpart(key: &str, name: &str) -> Outcome {
    let section = key.split('.').next().unwrap_or(key);
    if LAUNCHER.contains(&name) {
        return Outcome::ignored("it is about starting processes, as `trainyard run` does");
    }
    let row = WITHOUT_EFFECT
        .iter()
        .find(|(known, _)| *known == name || *known == section);
    if let Some((_, reason)) = row {
        return Outcome::ignored(*reason);
    }
    let known = LAUNCHER
        .into_iter()
        .chain(WITHOUT_EFFECT.iter().map(|(known, _)| *known))
        .chain(["mixed_precision", "zero_stage", "fsdp_sharding_strategy"]);
    let remedy = suggestion(name, known).map_or_else(
        || "remove it".to_owned(),
        |known| format!("did you mean {known}?"),
    );
    Outcome::rejected(
        "Trainyard does not know this key of Accelerate's, so it may change the result",
        remedy,
    )
}
