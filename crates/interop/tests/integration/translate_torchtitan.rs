//! torchtitan's TOML trains as it is: flavors, datasets and defaults are its own.

use trainyard_config::{Config, DecayType};
use trainyard_interop::{Framework, TranslateOptions, Translation};

const LLAMA: &str = include_str!("../configs/torchtitan/llama3_8b.toml");

fn translate(text: &str, world: Option<usize>) -> Translation {
    let options = TranslateOptions {
        world,
        has_model: false,
    };
    Framework::Torchtitan.translate(text, &options).unwrap()
}

fn config(text: &str, more: &[&str]) -> Result<Config, String> {
    let mut overrides = translate(text, Some(8)).overrides();
    overrides.extend(more.iter().map(|&setting| setting.to_owned()));
    Config::parse("", &overrides).map_err(|error| error.to_string())
}

#[test]
fn its_llama_trains_with_prepared_text() {
    assert_eq!(Framework::detect(LLAMA), Some(Framework::Torchtitan));
    assert_eq!(translate(LLAMA, Some(8)).rejected(&[]).count(), 0);
    let error = config(LLAMA, &[]).unwrap_err();
    assert!(error.contains("training.dataset_path"), "{error}");
    let config = config(LLAMA, &["--training.dataset_path=tokens"]).unwrap();
    let model = config.model.resolve().unwrap();
    assert_eq!(model.num_parameters(), Some(8_030_261_248));
    assert!(model.decoder().unwrap().rope_scaling.is_some());
    assert_eq!(config.optimizer.lr, 3e-4);
    assert_eq!(config.lr_scheduler.decay(), DecayType::Linear);
    assert_eq!(config.mesh(8).unwrap().world_size(), 8);
    assert_eq!(config.parallelism.data_parallel_shard_degree, -1);
}

#[test]
fn absent_keys_have_its_defaults() {
    let text = "[model]\nname = \"qwen3\"\nflavor = \"0.6B\"\n[training]\nsteps = 100\n";
    let config = config(text, &["--training.dataset_path=tokens"]).unwrap();
    assert_eq!(
        (config.optimizer.lr, config.lr_scheduler.warmup_steps),
        (8e-4, 100)
    );
    assert_eq!(config.activation_checkpoint.selective_ac_option, "2");
    let model = config.model.resolve().unwrap();
    let decoder = model.decoder().unwrap();
    assert!(decoder.tie_word_embeddings && decoder.qk_norm.is_some());
    assert_eq!(decoder.rope_theta, 1e6);
}

#[test]
fn another_config_may_describe_the_model() {
    let options = TranslateOptions {
        world: None,
        has_model: true,
    };
    let translation = Framework::Torchtitan.translate(LLAMA, &options).unwrap();
    let overrides = translation.overrides();
    assert!(
        !overrides
            .iter()
            .any(|setting| setting.starts_with("--model."))
    );
    assert!(
        !overrides
            .iter()
            .any(|setting| setting.contains("mixed_precision"))
    );
}

#[test]
fn a_pipeline_splits_the_local_batch() {
    let text = LLAMA
        .replace(
            "pipeline_parallel_degree = 1",
            "pipeline_parallel_degree = 2",
        )
        .replace("local_batch_size = 1", "local_batch_size = 8");
    let config = config(&text, &["--training.dataset_path=tokens"]).unwrap();
    assert_eq!(config.training.local_batch_size, 1);
    assert_eq!(config.training.global_batch_size, Some(32));
}

#[test]
fn what_changes_the_result_is_rejected() {
    let text = LLAMA
        .replace("name = \"AdamW\"", "name = \"Adam\"")
        .replace("dataset = \"c4\"", "dataset = \"mine\"")
        .replace(
            "flavor = \"8B\"",
            "flavor = \"8C\"\nconverters = [\"float8\"]",
        );
    let translation = translate(&text, Some(8));
    let rejected: Vec<&str> = translation
        .rejected(&[])
        .map(|key| key.key.as_str())
        .collect();
    assert_eq!(
        rejected,
        [
            "model.converters",
            "model.flavor",
            "optimizer.name",
            "training.dataset"
        ]
    );
}

#[test]
fn a_config_of_ours_is_not_torchtitans() {
    for text in [
        "[model]\nflavor = \"tiny\"\n[training]\nsteps = 10\n",
        "[model]\nname = \"mine\"\nvocab_size = 8\n[custom.mine]\nwidth = 3\n",
        "[model]\nflavor = \"llama3-8b\"\n[training]\ndataset = \"tokens\"\ndataset_path = \"x\"\n",
    ] {
        assert_eq!(
            Framework::detect(text),
            Some(Framework::Trainyard),
            "{text}"
        );
    }
}
