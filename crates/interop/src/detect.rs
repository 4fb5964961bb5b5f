//! Detects the framework that a config is for.

use super::Framework;
use super::accelerate::is_accelerate;
use super::arguments::CommandLine;
use super::torchtitan::{DATASETS, is_flavor};

/// TOML sections that torchtitan has and Trainyard does not.
const TORCHTITAN_SECTIONS: [&str; 6] = [
    "compile",
    "quantize",
    "fault_tolerance",
    "experimental",
    "memory_estimation",
    "float8",
];

/// Keys that only torchtitan has, in sections that both have.
const TORCHTITAN_KEYS: [(&str, &str); 9] = [
    ("training", "enable_cpu_offload"),
    ("training", "gc_freq"),
    ("parallelism", "pipeline_parallel_microbatch_size"),
    ("parallelism", "pipeline_parallel_layers_per_stage"),
    ("parallelism", "disable_loss_parallel"),
    ("parallelism", "context_parallel_rotate_method"),
    ("parallelism", "context_parallel_load_balancer"),
    ("parallelism", "expert_tensor_parallel_degree"),
    ("model", "converters"),
];

/// The models of torchtitan 0.2.2.
const TORCHTITAN_MODELS: [&str; 7] = [
    "deepseek_v3",
    "flux",
    "gpt_oss",
    "llama3",
    "llama3_ft",
    "llama4",
    "qwen3",
];

/// A DeepSpeed config has at least one of these keys.
const DEEPSPEED_KEYS: [&str; 6] = [
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
];

impl Framework {
    /// Detects the framework of a config. TOML that both Trainyard and torchtitan accept is taken to be Trainyard's.
    pub fn detect(text: &str) -> Option<Framework> {
        if text.trim_start().starts_with('{') {
            let json: serde_json::Map<String, serde_json::Value> =
                serde_json::from_str(text).ok()?;
            let is_known = DEEPSPEED_KEYS.iter().any(|&key| json.contains_key(key));
            return is_known.then_some(Framework::DeepSpeed);
        }
        match text.parse::<toml::Table>() {
            Ok(table) if !table.is_empty() => Some(detect_toml(&table)),
            _ if is_accelerate(text) => Some(Framework::Accelerate),
            _ => detect_command_line(text),
        }
    }
}

fn detect_toml(table: &toml::Table) -> Framework {
    let get = |section: &str, key: &str| table.get(section)?.get(key);
    let has_sections = TORCHTITAN_SECTIONS
        .iter()
        .any(|&section| table.contains_key(section));
    let has_keys = TORCHTITAN_KEYS
        .iter()
        .any(|&(section, key)| get(section, key).is_some());
    let text = |section, key| get(section, key).and_then(toml::Value::as_str);
    let has_values = text("model", "name").is_some_and(|name| TORCHTITAN_MODELS.contains(&name))
        || text("model", "flavor").is_some_and(is_flavor)
        || text("training", "dataset").is_some_and(|name| DATASETS.contains(&name));
    if has_sections || has_keys || has_values {
        Framework::Torchtitan
    } else {
        Framework::Trainyard
    }
}

fn detect_command_line(text: &str) -> Option<Framework> {
    let framework = Framework::Megatron;
    let line = CommandLine::parse(framework, text).ok()?;
    let words = line.arguments.iter();
    let begins = |start: &str| words.clone().any(|word| word.text.starts_with(start));
    if begins("--module") && begins("--config") {
        return Some(Framework::TorchtitanCommandLine);
    }
    let megatron_flags = [
        "--micro-batch-size",
        "--tensor-model-parallel-size",
        "--num-layers",
    ];
    megatron_flags
        .iter()
        .any(|flag| begins(flag))
        .then_some(Framework::Megatron)
}
