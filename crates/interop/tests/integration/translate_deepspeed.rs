//! DeepSpeed configs as tutorials have them: every key is translated, or named with the reason.

use std::fs;
use std::path::Path;

use proptest::prelude::{ProptestConfig, proptest};
use trainyard_config::{Config, Dtype, Offload, OffloadStates};
use trainyard_interop::{Framework, LaunchInfo, Outcome, TranslateOptions, Translation};

const MODEL: &str = "[model]\nflavor = \"tiny\"\n[training]\nseq_len = 128\n";

fn tutorial(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs/deepspeed");
    fs::read_to_string(folder.join(name)).unwrap()
}

fn translate(text: &str, world: Option<usize>) -> Translation {
    let options = TranslateOptions {
        world,
        has_model: true,
    };
    Framework::DeepSpeed.translate(text, &options).unwrap()
}

fn config(name: &str, world: Option<usize>) -> Config {
    let translation = translate(&tutorial(name), world);
    Config::parse(MODEL, &translation.overrides()).unwrap()
}

fn outcome<'a>(translation: &'a Translation, key: &str) -> &'a Outcome {
    let mut keys = translation.keys.iter();
    let found = keys.find(|translated| translated.key == key);
    &found
        .unwrap_or_else(|| panic!("{key} is not in the report"))
        .outcome
}

#[test]
fn zero_1_sets_batch_optimizer_and_schedule() {
    let config = config("zero1.json", Some(8));
    assert_eq!(config.training.global_batch_size, Some(32));
    assert_eq!(config.training.local_batch_size, 4);
    assert_eq!(config.parallelism.zero_stage, 1);
    assert_eq!(config.mesh(8).unwrap().world_size(), 8);
    assert_eq!(config.parallelism.reduce_bucket_size, Some(2_000_000_000));
    assert_eq!((config.optimizer.lr, config.optimizer.beta2), (3e-4, 0.95));
    assert_eq!(config.lr_scheduler.warmup_steps, 100);
    assert_eq!(config.metrics.log_freq, 100);
}

#[test]
fn zero_2_sets_overlap_buckets_and_recomputation() {
    let config = config("zero2.json", Some(8));
    assert_eq!(config.parallelism.zero_stage, 2);
    assert!(config.parallelism.overlap);
    assert_eq!(config.parallelism.reduce_bucket_size, Some(100_000_000));
    assert_eq!(config.training.mixed_precision_param, Some(Dtype::Bfloat16));
    assert_eq!(config.optimizer.weight_decay, 3e-7);
    let mode = trainyard_config::ActivationCheckpointMode::Full;
    assert_eq!(config.activation_checkpoint.mode, mode);
}

#[test]
fn zero_3_of_hugging_face_leaves_auto_to_the_config() {
    let translation = translate(&tutorial("zero3.json"), Some(8));
    assert!(matches!(
        outcome(&translation, "train_batch_size"),
        Outcome::Left { .. }
    ));
    let base = format!("{MODEL}local_batch_size = 2\n[optimizer]\nlr = 0.5\n");
    let config = Config::parse(&base, &translation.overrides()).unwrap();
    assert_eq!(
        (config.training.local_batch_size, config.optimizer.lr),
        (2, 0.5)
    );
    assert_eq!(config.parallelism.zero_stage, 3);
}

#[test]
fn fp16_scales_losses_and_names_its_warm_up() {
    let text = tutorial("fp16.json");
    let translation = translate(&text, Some(4));
    let rejected: Vec<_> = translation.rejected(&[]).collect();
    assert_eq!(rejected.len(), 1);
    assert_eq!(rejected[0].key, "scheduler.params.warmup_type");
    let config = config("fp16.json", Some(4));
    assert_eq!(config.training.mixed_precision_param, Some(Dtype::Float16));
    assert_eq!(
        (config.training.local_batch_size, config.optimizer.beta1),
        (4, 0.8)
    );
    let read = Framework::DeepSpeed.read_with(
        &text,
        &LaunchInfo {
            world: Some(4),
            seq_len: Some(128),
            ..LaunchInfo::default()
        },
    );
    assert_eq!(read.unwrap().strategy.precision.compute, 2);
}

#[test]
fn offload_moves_states_and_weights() {
    let config = config("offload.json", Some(8));
    assert_eq!(config.parallelism.offload, Offload::Cpu);
    assert_eq!(config.training.global_batch_size, Some(32));
    // DeepSpeed's defaults of an optimizer that the file has.
    assert_eq!(
        (config.optimizer.beta2, config.optimizer.weight_decay),
        (0.999, 0.0)
    );
    let states = tutorial("offload.json")
        .replace("\"stage\": 3", "\"stage\": 2")
        .replace(
            "\"offload_param\": { \"device\": \"cpu\", \"pin_memory\": true },",
            "",
        );
    let overrides = translate(&states, Some(8)).overrides();
    let config = Config::parse(MODEL, &overrides).unwrap();
    let parallelism = &config.parallelism;
    assert_eq!(
        (parallelism.zero_stage, parallelism.offload_states),
        (2, OffloadStates::Optimizer)
    );
}

#[test]
fn experts_are_placed_and_described() {
    let config = config("moe.json", Some(8));
    let experts = config.model.moe.as_ref().unwrap();
    assert_eq!(
        (experts.num_experts, experts.num_experts_per_tok),
        (Some(8), Some(2))
    );
    assert_eq!(experts.capacity_factor, Some(1.25));
    assert_eq!(config.mesh(8).unwrap().ep(), 4);
    let noisy = tutorial("moe.json").replace("null", "\"RSample\"");
    let translation = translate(&noisy, Some(8));
    let rejected: Vec<_> = translation.rejected(&[]).map(|key| &key.key).collect();
    assert_eq!(rejected, ["moe.noisy_gate_policy"]);
}

#[test]
fn unknown_keys_are_rejected_with_a_suggestion() {
    let text = r#"{"train_batch_size": 8, "zero_optimization": {"overlap_com": true}, "curriculum_learning": {"enabled": true}}"#;
    let translation = translate(text, None);
    let rejected: Vec<String> = translation.rejected(&[]).map(ToString::to_string).collect();
    assert_eq!(rejected.len(), 2, "{rejected:?}");
    assert!(
        rejected[1].contains("did you mean zero_optimization.overlap_comm?"),
        "{rejected:?}"
    );
    let ignored = [
        "curriculum_learning".to_owned(),
        "zero_optimization".to_owned(),
    ];
    assert_eq!(translation.rejected(&ignored).count(), 0);
}

#[test]
fn batch_sizes_must_agree_with_the_launcher() {
    let text = tutorial("zero1.json");
    let options = |world| TranslateOptions {
        world,
        has_model: true,
    };
    assert!(
        Framework::DeepSpeed
            .translate(&text, &options(None))
            .is_ok()
    );
    let error = Framework::DeepSpeed.translate(&text, &options(Some(4)));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("4 x 1 x 4 data-parallel ranks"), "{error}");
}

#[test]
fn every_key_of_a_tutorial_is_in_the_report() {
    for name in ["zero1", "zero2", "zero3", "fp16", "offload", "moe"] {
        let text = tutorial(&format!("{name}.json"));
        let translation = translate(&text, Some(8).filter(|_| name != "fp16"));
        let root: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut sections = root.as_object().unwrap().keys();
        assert!(
            sections.all(|section| translation.keys.iter().any(|key| key.is_named(section))),
            "{name}"
        );
        for key in &translation.keys {
            assert!(!key.to_string().contains("does not know"), "{name}: {key}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn hostile_files_never_panic(at in 0usize..1500, inserted in "[\\[\\]{}\",:0-9a-z\\.-]{0,12}", world: Option<usize>) {
        let options = TranslateOptions { world, has_model: true };
        for name in ["zero2.json", "offload.json", "moe.json"] {
            let text = tutorial(name);
            let at = at.min(text.len());
            let changed = format!("{}{inserted}{}", &text[..at], &text[at..]);
            let _ = Framework::DeepSpeed.translate(&changed, &options);
            let huge = text.replace("4", "18446744073709551615");
            let _ = Framework::DeepSpeed.translate(&huge, &options);
        }
    }
}
