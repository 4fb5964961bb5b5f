//! Any text loads or fails with an error, and never panics.

use proptest::prelude::*;
use trainyard_config::Config;

/// Loads a text, and calls every function of the result.
fn exercise(text: &str, overrides: &[String], ranks: usize) {
    match Config::parse(text, overrides) {
        Ok(config) => {
            let _ = config.mesh(ranks);
            let _ = config.batching(ranks);
            let _ = config.model.resolve().unwrap().num_parameters();
            config.shrink().check().unwrap();
            let again = Config::parse(&config.to_toml().unwrap(), &[]).unwrap();
            assert_eq!(again, config);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Every key of the config, optional ones too, and a few unknown ones.
fn key() -> impl Strategy<Value = String> {
    let table = toml::Table::try_from(Config::default()).unwrap();
    let mut keys: Vec<String> = table
        .iter()
        .flat_map(|(section, keys)| {
            let keys = keys.as_table().unwrap().keys();
            keys.map(move |key| format!("{section}.{key}"))
        })
        .collect();
    for name in [
        "model.flavor",
        "model.vocab_size",
        "model.hidden_size",
        "model.intermediate_size",
        "model.num_hidden_layers",
        "model.num_attention_heads",
        "model.num_key_value_heads",
        "model.head_dim",
        "model.rope_theta",
        "model.max_position_embeddings",
        "training.global_batch_size",
        "training.dataset_path",
        "training.mixed_precision_param",
        "lr_scheduler.decay_ratio",
        "lr_scheduler.decay_type",
        "lr_scheduler.linear_scaling_base_batch",
        "training.step",
        "trainning.steps",
        "steps",
        "model",
        "\"\".x",
    ] {
        keys.push(name.to_owned());
    }
    prop::sample::select(keys)
}

fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        (0i64..20).prop_map(|number| number.to_string()),
        any::<i64>().prop_map(|number| number.to_string()),
        any::<f64>().prop_map(|number| format!("{number:?}").to_lowercase()),
        any::<bool>().prop_map(|flag| flag.to_string()),
        prop::sample::select(vec![
            "\"tiny\"",
            "\"llama3-405b\"",
            "\"cnn\"",
            "\"mnist\"",
            "\"float64\"",
            "\"bfloat16\"",
            "\"cosine\"",
            "\"bf16\"",
            "nan",
            "-inf",
            "[]",
            "{}",
            "{ a = 1 }",
            "1979-05-27",
            "\"\"",
            "99999999999999999999",
            "0x10",
        ])
        .prop_map(str::to_owned),
    ]
}

fn setting() -> impl Strategy<Value = String> {
    (key(), value()).prop_map(|(key, value)| format!("{key} = {value}\n"))
}

fn argument() -> impl Strategy<Value = String> {
    let bare = |value: String| value.trim_matches('"').to_owned();
    prop_oneof![
        4 => key().prop_map(|key| format!("--{key}")),
        4 => value().prop_map(bare),
        4 => (key(), value()).prop_map(move |(key, value)| format!("--{key}={}", bare(value))),
        1 => ".{0,20}",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn settings_at_random(
        settings in prop::collection::vec(setting(), 0..4),
        arguments in prop::collection::vec(argument(), 0..4),
        ranks in 0usize..9,
    ) {
        exercise(&settings.concat(), &arguments, ranks);
    }

    #[test]
    fn text_at_random(text in "[a-z\\[\\]{}.=\"'#\\-\\\\0-9_\n\t é]{0,80}", ranks: usize) {
        exercise(&text, &[], ranks);
    }

    #[test]
    fn anything_at_all(text: String, arguments: Vec<String>) {
        exercise(&text, &arguments, 1);
    }
}

#[test]
fn deep_nesting_is_refused() {
    for bracket in ["[", "{a=", "a."] {
        let text = format!("x = {}", bracket.repeat(20_000));
        assert!(Config::parse(&text, &[]).is_err());
    }
}

#[test]
fn no_key_accepts_nan() {
    let table = toml::Table::try_from(Config::default()).unwrap();
    for (section, keys) in &table {
        for (key, value) in keys.as_table().unwrap() {
            if value.is_float() {
                Config::parse(&format!("{section}.{key} = nan"), &[]).unwrap_err();
            }
        }
    }
}
