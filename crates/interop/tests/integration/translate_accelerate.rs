//! The YAML that `accelerate config` writes.

use trainyard_config::{ActivationCheckpointMode, Config, Dtype, Offload};
use trainyard_interop::{Framework, LaunchInfo, TranslateOptions, Translation};

const FSDP: &str = include_str!("../configs/accelerate/fsdp.yaml");
const DEEPSPEED: &str = include_str!("../configs/accelerate/deepspeed.yaml");

fn translate(text: &str) -> Translation {
    let options = TranslateOptions {
        world: Some(8),
        has_model: true,
    };
    Framework::Accelerate.translate(text, &options).unwrap()
}

fn config(text: &str) -> Config {
    let translation = translate(text);
    let rejected: Vec<String> = translation.rejected(&[]).map(ToString::to_string).collect();
    assert!(rejected.is_empty(), "{rejected:?}");
    Config::parse("training.seq_len = 128", &translation.overrides()).unwrap()
}

#[test]
fn fsdp_becomes_zero_3() {
    assert_eq!(Framework::detect(FSDP), Some(Framework::Accelerate));
    let config = config(FSDP);
    assert_eq!(config.parallelism.zero_stage, 3);
    assert_eq!(config.parallelism.data_parallel_shard_degree, -1);
    assert_eq!(
        config.activation_checkpoint.mode,
        ActivationCheckpointMode::Full
    );
    assert_eq!(config.training.mixed_precision_param, Some(Dtype::Bfloat16));
}

#[test]
fn the_deepspeed_plugin_is_read() {
    assert_eq!(Framework::detect(DEEPSPEED), Some(Framework::Accelerate));
    let config = config(DEEPSPEED);
    assert_eq!(
        (config.parallelism.zero_stage, config.training.max_norm),
        (3, 1.0)
    );
    assert_eq!(config.parallelism.offload, Offload::Cpu);
    assert_eq!(config.training.mixed_precision_param, Some(Dtype::Float16));
}

#[test]
fn hybrid_shards_have_replicas() {
    let text = FSDP
        .replace("FULL_SHARD", "HYBRID_SHARD")
        .replace("num_machines: 1", "num_machines: 2");
    assert_eq!(config(&text).parallelism.data_parallel_shard_degree, 4);
    let launch = LaunchInfo {
        world: Some(8),
        seq_len: Some(128),
        ..LaunchInfo::default()
    };
    let read = Framework::Accelerate.read_with(&text, &launch).unwrap();
    let degrees = read.strategy.degrees;
    assert_eq!((degrees.dp_replicate, degrees.dp_shard), (2, 4));
}

#[test]
fn what_changes_the_result_is_named() {
    let text = DEEPSPEED
        .replace(
            "gradient_accumulation_steps: 1",
            "gradient_accumulation_steps: 4",
        )
        .replace(
            "zero_stage: 3",
            "zero_stage: 3\n  deepspeed_config_file: ds.json",
        )
        .replace(
            "mixed_precision: fp16",
            "mixed_precision: fp8\nmixed_precisions: bf16",
        );
    let translation = translate(&text);
    let rejected: Vec<&str> = translation
        .rejected(&[])
        .map(|key| key.key.as_str())
        .collect();
    assert_eq!(
        rejected,
        [
            "deepspeed_config.deepspeed_config_file",
            "deepspeed_config.gradient_accumulation_steps",
            "mixed_precision",
            "mixed_precisions",
        ]
    );
    let suggested = translation.rejected(&[]).last().map(ToString::to_string);
    assert!(suggested.is_some_and(|line| line.contains("did you mean mixed_precision?")));
}

#[test]
fn an_estimate_names_the_batch_that_it_assumes() {
    let launch = LaunchInfo {
        world: Some(8),
        seq_len: Some(128),
        ..LaunchInfo::default()
    };
    let read = Framework::Accelerate.read_with(FSDP, &launch).unwrap();
    assert_eq!(read.strategy.micro_batch, 8);
    assert!(read.unmodeled[0].contains("micro-batches of 8"));
    let error = Framework::Accelerate.read(FSDP).unwrap_err().to_string();
    assert!(error.contains("Accelerate"), "{error}");
}
