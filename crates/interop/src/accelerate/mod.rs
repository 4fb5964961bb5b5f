//! The YAML config of Hugging Face's Accelerate, which `accelerate config` writes.
//!
//! Its keys name a plugin (DeepSpeed, FSDP, Megatron-LM) and settings of it. Where DeepSpeed has the same setting, its
//! translation and its estimate are used, so that both agree.

mod equivalent;
mod yaml;

use serde_json::{Map, Value, json};
use trainyard_plan::Precision;

use super::deepspeed::{self, File};
use super::{
    Framework, FrameworkError, LaunchInfo, Outcome, ParsedJob, TranslateOptions, Translation,
};
use equivalent::{Equivalent, equivalent};
pub(super) use yaml::parse;

const FRAMEWORK: Framework = Framework::Accelerate;

/// A config has at least one of these keys.
const KEYS: [&str; 4] = [
    "distributed_type",
    "compute_environment",
    "deepspeed_config",
    "fsdp_config",
];

/// Whether this is YAML with keys of Accelerate.
pub(super) fn is_accelerate(text: &str) -> bool {
    parse(text).is_ok_and(|root| KEYS.iter().any(|key| root.get(key).is_some()))
}

/// The file, and the DeepSpeed config that says the same.
struct Config {
    keys: Vec<(String, Value, Equivalent)>,
    deepspeed: Map<String, Value>,
    file: File,
}

impl Config {
    fn parse(text: &str) -> Result<Config, FrameworkError> {
        let root = parse(text).map_err(|error| FRAMEWORK.syntax(error))?;
        let file = File::new(root).map_err(own)?;
        let mut keys = Vec::new();
        let mut deepspeed = Map::new();
        for (key, value) in file.leaves() {
            let found = equivalent(&file, &key, value)?;
            if let Equivalent::DeepSpeed(settings) = &found {
                for (path, value) in settings {
                    insert(&mut deepspeed, path, value.clone());
                }
            }
            keys.push((key, value.clone(), found));
        }
        Ok(Config {
            keys,
            deepspeed,
            file,
        })
    }
}

pub(super) fn translate(
    text: &str,
    options: &TranslateOptions,
) -> Result<Translation, FrameworkError> {
    let config = Config::parse(text)?;
    let deepspeed = Value::Object(config.deepspeed);
    let translated = deepspeed::translate_value(deepspeed, options).map_err(own)?;
    let mut translation = Translation::default();
    for (key, value, found) in config.keys {
        let outcome = match found {
            Equivalent::Trainyard(outcome) => outcome,
            Equivalent::DeepSpeed(settings) => outcome_of(&translated, &settings),
        };
        translation.push(key, value, outcome);
    }
    Ok(translation)
}

/// What the first of these DeepSpeed keys became. The others, if any, are part of it.
fn outcome_of(translated: &Translation, settings: &[(&'static str, Value)]) -> Outcome {
    let first = settings.first().map(|(path, _)| *path);
    let found = translated
        .keys
        .iter()
        .find(|row| Some(row.key.as_str()) == first);
    found.map_or_else(
        || Outcome::left("part of another key"),
        |row| row.outcome.clone(),
    )
}

pub(super) fn read(text: &str, launch: &LaunchInfo) -> Result<ParsedJob, FrameworkError> {
    let mut config = Config::parse(text)?;
    let steps = "gradient_accumulation_steps";
    for key in [steps, "deepspeed_config.gradient_accumulation_steps"] {
        if let Some(value) = config.file.get(key) {
            config.deepspeed.insert(steps.to_owned(), value.clone());
        }
    }
    // The script sets it, so the planner takes Trainyard's.
    let micro = "train_micro_batch_size_per_gpu";
    config.deepspeed.insert(micro.to_owned(), json!("auto"));
    let root = Value::Object(config.deepspeed);
    let mut job = deepspeed::read_value(root, launch).map_err(own)?;
    let degrees = &mut job.strategy.degrees;
    let replicate = equivalent::replicate_degree(&config.file).map_err(own)?;
    if let Some(replicate) = replicate {
        degrees.dp_shard = FRAMEWORK.left_of(Some(degrees.data_parallel()), &[replicate])?;
        degrees.dp_replicate = replicate;
    }
    if config.file.has("fsdp_config") {
        // FSDP casts weights when they are needed, and keeps no copy beside them.
        job.strategy.precision = match job.strategy.precision.compute {
            2 => Precision::MIXED,
            _ => Precision::FP32,
        };
        job.software.overlaps_data = true;
    }
    Ok(job)
}

/// The error as one of this format.
fn own(error: FrameworkError) -> FrameworkError {
    match error {
        FrameworkError::Syntax { reason, .. } => FRAMEWORK.syntax(reason),
        FrameworkError::Unspecified { what, remedy, .. } => FRAMEWORK.unspecified(what, remedy),
        FrameworkError::Unsupported {
            what, why, nearest, ..
        } => FRAMEWORK.unsupported(what, why, nearest),
        other => other,
    }
}

/// Inserts a value at a dotted path.
fn insert(root: &mut Map<String, Value>, path: &str, value: Value) {
    let Some((section, rest)) = path.split_once('.') else {
        root.insert(path.to_owned(), value);
        return;
    };
    let inner = root
        .entry(section)
        .or_insert_with(|| Value::Object(Map::new()));
    if let Value::Object(inner) = inner {
        insert(inner, rest, value);
    }
}
