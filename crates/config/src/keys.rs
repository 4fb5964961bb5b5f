//! The keys of a config: what each takes, its default, and what it means.

use documented::DocumentedFields;
use serde::Serialize;
use toml::{Table, Value};

use crate::schema::{Kind, Schema};
use crate::{
    ActivationCheckpointSection, CheckpointSection, CommSection, Config, DebugSection, JobSection,
    LocalUpdatesSection, LrSchedulerSection, MetricsSection, ModelSection, MoeSection,
    OptimizerSection, ParallelismSection, ParameterServerSection, ProfilingSection,
    TrainingSection, ValidationSection, ValueGuardSection,
};

/// A key of a config.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Key {
    /// Its section and name, as in `training.steps`.
    pub key: &'static str,
    /// The values that it takes.
    pub expects: String,
    /// Its value if a config does not have it, as TOML; `None` if the key is then off, or follows from other keys.
    pub default: Option<String>,
    /// What it means.
    pub meaning: String,
}

impl Key {
    /// Its section, as in `training`.
    pub fn section(&self) -> &'static str {
        self.split().0
    }

    /// Its name in the section, as in `steps`.
    pub fn name(&self) -> &'static str {
        self.split().1
    }

    fn split(&self) -> (&'static str, &'static str) {
        self.key.rsplit_once('.').unwrap_or(("", self.key))
    }
}

/// All keys in the order of their sections, without those of registered components.
pub fn keys() -> Vec<Key> {
    let defaults = Table::try_from(Config::default()).unwrap_or_default();
    let key = |(key, kind): (&'static str, Kind)| Key {
        key,
        expects: kind.describe("", &[]),
        default: value_at(&defaults, key).map(Value::to_string),
        meaning: meaning(key).unwrap_or_default().replace('\n', " "),
    };
    let entries = Schema::get().entries();
    entries
        .filter(|(key, _)| key.contains('.'))
        .map(key)
        .collect()
}

/// The value of a dotted key.
pub(crate) fn value_at<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        Some((first, rest)) => value_at(table.get(first)?.as_table()?, rest),
        None => table.get(key),
    }
}

/// The documentation of the field that has a key.
fn meaning(key: &str) -> Option<&'static str> {
    let (section, name) = key.rsplit_once('.')?;
    let documentation = match section {
        "job" => JobSection::get_field_docs(name),
        "model" => ModelSection::get_field_docs(name),
        "model.rope_scaling" => {
            return Some("As in the `rope_scaling` of Hugging Face's config.json.");
        }
        "model.moe" => MoeSection::get_field_docs(name),
        "training" => TrainingSection::get_field_docs(name),
        "parallelism" => ParallelismSection::get_field_docs(name),
        "local_updates" => LocalUpdatesSection::get_field_docs(name),
        "parameter_server" => ParameterServerSection::get_field_docs(name),
        "optimizer" => OptimizerSection::get_field_docs(name),
        "lr_scheduler" => LrSchedulerSection::get_field_docs(name),
        "checkpoint" => CheckpointSection::get_field_docs(name),
        "activation_checkpoint" => ActivationCheckpointSection::get_field_docs(name),
        "metrics" => MetricsSection::get_field_docs(name),
        "profiling" => ProfilingSection::get_field_docs(name),
        "validation" => ValidationSection::get_field_docs(name),
        "value_guard" => ValueGuardSection::get_field_docs(name),
        "comm" => CommSection::get_field_docs(name),
        "debug" => DebugSection::get_field_docs(name),
        _ => return None,
    };
    documentation.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_meaning() {
        let keys = keys();
        let silent = keys.iter().filter(|key| key.meaning.is_empty());
        assert_eq!(silent.map(|key| key.key).collect::<Vec<_>>(), [""; 0]);
        let steps = keys.iter().find(|key| key.key == "training.steps");
        let steps = steps.expect("a key that every config has");
        assert_eq!((steps.section(), steps.name()), ("training", "steps"));
        assert_eq!(steps.expects, "a non-negative integer");
        assert!(steps.default.is_some());
    }
}
