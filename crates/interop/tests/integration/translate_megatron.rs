//! Megatron-LM's shell scripts: variables and arrays are read, never executed.

use proptest::prelude::{ProptestConfig, proptest};
use trainyard_config::{Config, DecayType, Dtype};
use trainyard_interop::{Framework, LaunchInfo, TranslateOptions, Translation};

const SCRIPT: &str = include_str!("../configs/megatron/llama.sh");

fn translate(text: &str) -> Translation {
    let options = TranslateOptions {
        world: Some(8),
        has_model: false,
    };
    Framework::Megatron.translate(text, &options).unwrap()
}

fn rejected(text: &str) -> Vec<String> {
    let translation = translate(text);
    translation
        .rejected(&[])
        .map(|key| key.key.clone())
        .collect()
}

#[test]
fn a_script_trains() {
    assert_eq!(Framework::detect(SCRIPT), Some(Framework::Megatron));
    assert_eq!(rejected(SCRIPT), [""; 0]);
    let mut overrides = translate(SCRIPT).overrides();
    let error = Config::parse("", &overrides).unwrap_err().to_string();
    assert!(error.contains("training.dataset_path"), "{error}");
    overrides.push("--training.dataset_path=tokens".to_owned());
    let config = Config::parse("", &overrides).unwrap();
    let model = config.model.resolve().unwrap();
    assert_eq!(model.num_parameters(), Some(8_030_261_248));
    assert_eq!(config.mesh(8).unwrap().to_string(), "dp_shard4 x tp2");
    assert_eq!(config.parallelism.zero_stage, 1);
    assert_eq!(config.lr_scheduler.decay(), DecayType::Cosine);
    assert!((config.lr_scheduler.min_lr_factor - 0.1).abs() < 1e-12);
    assert_eq!(config.training.mixed_precision_param, Some(Dtype::Bfloat16));
    assert!(config.checkpoint.enable);
}

#[test]
fn a_script_is_estimated() {
    let read = Framework::Megatron.read(SCRIPT).unwrap();
    assert_eq!(read.world, Some(8));
    assert_eq!((read.strategy.degrees.tp, read.strategy.zero_stage), (2, 1));
    assert_eq!(read.shape.unwrap().intermediate_size, 14_336);
}

#[test]
fn a_gpt_has_megatrons_defaults() {
    let text = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 12 --hidden-size 768 \
        --num-attention-heads 12 --max-position-embeddings 1024 --seq-length 1024 --vocab-size 50257 \
        --micro-batch-size 4 --lr 1e-4 --train-iters 100 --mock-data --fp16";
    // Attention of Trainyard's models has no dropout.
    assert_eq!(rejected(text), ["--attention-dropout"]);
    let config = Config::parse("", &translate(text).overrides()).unwrap();
    assert_eq!(
        (config.optimizer.weight_decay, config.optimizer.beta2),
        (0.01, 0.999)
    );
    assert_eq!(config.model.resid_pdrop, Some(0.1));
    assert_eq!(config.training.global_batch_size, Some(32));
    assert_eq!(config.training.mixed_precision_param, Some(Dtype::Float16));
}

#[test]
fn what_is_not_readable_is_an_error_where_it_matters() {
    let text = SCRIPT.replace("TP=2", "TP=$(nproc)");
    let error = Framework::Megatron.read(&text).unwrap_err().to_string();
    assert!(
        error.contains("$(nproc)") && error.contains("not executed"),
        "{error}"
    );
    let text = SCRIPT.replace("TP=2", "TP=2\nif [ -n \"$BIG\" ]; then TP=4; fi");
    let error = Framework::Megatron.read(&text).unwrap_err().to_string();
    assert!(
        error.contains("TP is assigned under a condition"),
        "{error}"
    );
    let text = SCRIPT.replace("${1:-checkpoints/llama}", "$1");
    assert_eq!(rejected(&text), [""; 0]);
    assert!(
        !translate(&text)
            .overrides()
            .iter()
            .any(|setting| setting.contains("checkpoint.folder"))
    );
}

#[test]
fn what_changes_the_result_is_rejected() {
    let text = SCRIPT
        .replace(
            "--bf16",
            "--bf16 --rampup-batch-size 8 8 1000 --fp8-format hybrid",
        )
        .replace("--lr-decay-style cosine", "--lr-decay-style WSD");
    assert_eq!(
        rejected(&text),
        ["--fp8-format", "--lr-decay-style", "--rampup-batch-size"]
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn hostile_scripts_never_panic(at in 0usize..2500, inserted in "[$(){}\"'`\\\\;&|<>#=@\\[\\] \\nA-C0-9-]{0,16}") {
        let at = at.min(SCRIPT.len());
        let changed = format!("{}{inserted}{}", &SCRIPT[..at], &SCRIPT[at..]);
        let launch = LaunchInfo { world: Some(at), ..LaunchInfo::default() };
        let _ = Framework::Megatron.read_with(&changed, &launch);
        let options = TranslateOptions { world: Some(at), has_model: false };
        let _ = Framework::Megatron.translate(&changed, &options);
        let _ = Framework::detect(&changed);
    }
}
