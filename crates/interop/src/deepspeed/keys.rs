//! The other keys: pipelines, recomputation, logging, and sections that Trainyard does not have.

use serde_json::Value;

use super::super::{FrameworkError, Outcome};
use super::axes::{SEQUENCE, STAGES, TENSOR};
use super::file::{File, invalid, whole};
use super::{NOTES, zero};

/// Sections and keys that change neither the result nor what is trained.
const WITHOUT_EFFECT: [(&str, &str); 31] = [
    (
        "wall_clock_breakdown",
        "profiling.enable_profiling writes a trace of every step",
    ),
    ("dump_state", "`--print-config` prints the config"),
    (
        "memory_breakdown",
        "profiling.memory draws the memory of a step",
    ),
    (
        "flops_profiler",
        "the log has FLOPs, and profiling.enable_profiling writes a trace",
    ),
    (
        "comms_logger",
        "profiling.enable_profiling records every collective with its bytes",
    ),
    (
        "wandb",
        "metrics go to the log, metrics.enable_tensorboard and metrics.enable_jsonl",
    ),
    (
        "comet",
        "metrics go to the log, metrics.enable_tensorboard and metrics.enable_jsonl",
    ),
    (
        "csv_monitor",
        "metrics.enable_jsonl writes metrics as JSON lines",
    ),
    (
        "tensorboard",
        "TensorBoard files are in metrics.save_tb_folder",
    ),
    (
        "monitor_config",
        "metrics go to the log, metrics.enable_tensorboard and metrics.enable_jsonl",
    ),
    (
        "autotuning",
        "`trainyard plan` finds a strategy without running it",
    ),
    ("aio", "Trainyard chooses the sizes of disk accesses itself"),
    (
        "checkpoint",
        "checkpoints are sharded and load on any number of ranks; see [checkpoint]",
    ),
    (
        "nebula",
        "checkpoint.async_mode writes while training continues",
    ),
    (
        "use_node_local_storage",
        "all ranks write to one checkpoint folder",
    ),
    (
        "load_universal_checkpoint",
        "every checkpoint loads on any number of ranks",
    ),
    ("compile", "Trainyard does not compile models"),
    ("torch_compile", "Trainyard does not compile models"),
    (
        "torch_autocast",
        "layers compute in training.mixed_precision_param",
    ),
    (
        "prescale_gradients",
        "gradients are averaged once, without overflow",
    ),
    (
        "gradient_predivide_factor",
        "gradients are averaged once, without overflow",
    ),
    (
        "sparse_gradients",
        "gradients of embeddings are reduced as dense ones, with the same sum",
    ),
    (
        "zero_allow_untested_optimizer",
        "every optimizer works with ZeRO",
    ),
    (
        "zero_force_ds_cpu_optimizer",
        "there is one implementation per optimizer",
    ),
    (
        "disable_allgather",
        "parameters are always gathered by all-gather",
    ),
    (
        "fp32_allreduce",
        "gradients are reduced in training.dtype by default",
    ),
    ("graph_harvesting", "there are no CUDA graphs"),
    ("hybrid_engine", "it is about generation"),
    (
        "timers",
        "profiling.enable_profiling writes a trace of every step",
    ),
    (
        "dataloader_drop_last",
        "training.steps ends a job, not the data",
    ),
    (
        "use_data_before_expert_parallel",
        "experts are placed over dp_shard, cp and tp",
    ),
];

/// Sections that change the result if they are enabled.
const RESULT: [(&str, &str, &str); 13] = [
    (
        "curriculum_learning",
        "all sequences have training.seq_len tokens",
        "remove it",
    ),
    (
        "data_efficiency",
        "all samples are used as they are",
        "remove it",
    ),
    (
        "progressive_layer_drop",
        "all layers are computed in every step",
        "remove it",
    ),
    (
        "compression_training",
        "models are trained without compression",
        "remove it",
    ),
    (
        "quantize_training",
        "models are trained without quantization",
        "remove it",
    ),
    (
        "eigenvalue",
        "models are trained without quantization",
        "remove it",
    ),
    ("sparse_attention", "attention is dense", "remove it"),
    (
        "random_ltd",
        "all tokens are computed in every layer",
        "remove it",
    ),
    (
        "elasticity",
        "DeepSpeed chooses the batch size by the number of ranks",
        "remove it and give train_batch_size, which `trainyard run --nnodes MIN:MAX` keeps",
    ),
    (
        "domino",
        "it is another tensor parallelism",
        "use tensor_parallel.autotp_size",
    ),
    (
        "weight_quantization",
        "models are trained without quantization",
        "remove it",
    ),
    (
        "superoffload",
        "states are offloaded as parallelism.offload says",
        "remove it",
    ),
    (
        "autoep",
        "experts are described in a moe section",
        "use moe.ep_size",
    ),
];

pub(super) fn outcome(
    file: &File,
    key: &str,
    value: &Value,
) -> Result<Option<Outcome>, FrameworkError> {
    let count = || whole(value).ok_or_else(|| invalid(key, value, "a whole number"));
    Ok(Some(match key {
        "gradient_clipping" => {
            let norm = value
                .as_f64()
                .ok_or_else(|| invalid(key, value, "a number"))?;
            Outcome::set("training.max_norm", norm)
        }
        "steps_per_print" => Outcome::set("metrics.log_freq", count()?.max(1)),
        "tensorboard.enabled" => Outcome::set("metrics.enable_tensorboard", file.flag(key)?),
        "seed" => Outcome::set("debug.seed", count()?),
        TENSOR => Outcome::set("parallelism.tensor_parallel_degree", count()?.max(1)),
        SEQUENCE => ulysses(count()?.max(1)),
        key if STAGES.contains(&key) => pipeline(count()?.max(1)),
        "pipeline.activation_checkpoint_interval" => match count()? {
            0 => Outcome::set("activation_checkpoint.mode", "none"),
            interval => Outcome::set("activation_checkpoint.mode", "full").with_note(format!(
                "every block by itself, not {interval} layers at once"
            )),
        },
        "pipeline.partition_method" | "pipeline.partition" => Outcome::ignored(
            "stages are balanced by cost; parallelism.pipeline_parallel_split_points sets them",
        ),
        key if key.starts_with("pipeline.") => {
            Outcome::ignored("it changes speed and memory only; stages exchange whole activations")
        }
        key if key.starts_with("tensor_parallel.") => {
            Outcome::ignored("Trainyard knows how to split its models")
        }
        key if key.starts_with("activation_checkpointing.") => recomputation(file, key, value)?,
        key if key.starts_with(NOTES) => return note(file, key, value),
        key => return Ok(by_section(key, value)),
    }))
}

fn ulysses(degree: usize) -> Outcome {
    Outcome::set_all([
        ("parallelism.context_parallel_degree", degree.to_string()),
        ("parallelism.context_parallel_method", "ulysses".to_owned()),
    ])
}

fn pipeline(degree: usize) -> Outcome {
    let mut settings = vec![("parallelism.pipeline_parallel_degree", degree.to_string())];
    if degree > 1 {
        settings.push(("parallelism.pipeline_parallel_schedule", "1F1B".to_owned()));
    }
    Outcome::set_all(settings)
}

/// The keys of `activation_checkpointing` that ask for recomputation. DeepSpeed's script decides which layers.
const ASKS: [&str; 4] = [
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.number_checkpoints",
];

/// The first key of `activation_checkpointing` that asks for recomputation.
pub(super) fn asks_for_recomputation(file: &File) -> Option<&'static str> {
    let asks = |key: &&str| match file.get(key) {
        None | Some(Value::Bool(false)) => false,
        Some(value) => value.as_u64() != Some(0),
    };
    ASKS.into_iter().find(asks)
}

fn recomputation(file: &File, key: &str, value: &Value) -> Result<Outcome, FrameworkError> {
    if asks_for_recomputation(file) == Some(key) {
        return Ok(Outcome::set("activation_checkpoint.mode", "full").with_note(
            "every block; DeepSpeed's script chooses layers. Activations stay whole, on the device",
        ));
    }
    Ok(match value {
        Value::Bool(false) => Outcome::ignored("it is off"),
        _ => Outcome::ignored(
            "it changes memory and speed only; blocks are recomputed, their inputs stay on the device",
        ),
    })
}

/// The keys that our own writer adds for what DeepSpeed's JSON cannot express.
fn note(file: &File, key: &str, value: &Value) -> Result<Option<Outcome>, FrameworkError> {
    let name = key
        .strip_prefix(NOTES)
        .and_then(|rest| rest.strip_prefix('.'));
    let count = || whole(value).ok_or_else(|| invalid(key, value, "a whole number"));
    Ok(Some(match name {
        Some("launch") => Outcome::left("`trainyard run` takes the same flags"),
        Some("seq_len") => Outcome::set("training.seq_len", count()?),
        Some("pipeline_parallel_degree") => pipeline(count()?.max(1)),
        Some("context_parallel_degree") => {
            Outcome::set("parallelism.context_parallel_degree", count()?.max(1))
        }
        Some("expert_parallel_degree") => {
            Outcome::set("parallelism.expert_parallel_degree", count()?.max(1))
        }
        Some("recompute") => match file.text(key) {
            Some(mode @ ("none" | "full")) => Outcome::set("activation_checkpoint.mode", mode),
            _ => return Err(invalid(key, value, "\"none\" or \"full\"")),
        },
        _ => return Ok(None),
    }))
}

fn by_section(key: &str, value: &Value) -> Option<Outcome> {
    let section = key.split('.').next().unwrap_or(key);
    let find = |(known, _): &&(&str, &str)| *known == section;
    if let Some((_, reason)) = WITHOUT_EFFECT.iter().find(find) {
        return Some(Outcome::ignored(*reason));
    }
    let (_, reason, remedy) = RESULT.iter().find(|(known, ..)| *known == section)?;
    Some(match value {
        Value::Bool(false) if key == section => Outcome::ignored("it is off"),
        _ => Outcome::rejected(*reason, *remedy),
    })
}

/// Names of keys, to suggest one for an unknown key.
pub(super) fn known() -> Vec<String> {
    let own = [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "steps_per_print",
        "communication_data_type",
        "optimizer.type",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "scheduler.type",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.total_num_steps",
        "fp16.enabled",
        "fp16.loss_scale",
        "bf16.enabled",
        "moe.ep_size",
        "moe.num_experts",
        "moe.top_k",
        "moe.capacity_factor",
        "pipeline.stages",
        TENSOR,
    ];
    let own = own.into_iter().map(str::to_owned);
    let ignored = WITHOUT_EFFECT.iter().map(|(name, _)| (*name).to_owned());
    own.chain(ignored).chain(zero::known()).collect()
}
