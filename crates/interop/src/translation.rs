//! What the keys of another framework's config become in Trainyard's.

use std::fmt;

use serde::Serialize;

/// Another framework's config, key by key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Translation {
    /// The keys, in the order of the report.
    pub keys: Vec<TranslatedKey>,
}

/// One key of another framework's config, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TranslatedKey {
    /// The key as the file has it, such as `zero_optimization.stage` or `--lr`.
    pub key: String,
    /// Its value.
    pub value: String,
    /// What it becomes.
    pub outcome: Outcome,
}

/// What a key of another framework's config becomes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It sets keys of Trainyard's config.
    Set {
        /// The keys with their values.
        settings: Vec<(String, String)>,
        /// How the meaning differs, or an empty string.
        note: String,
    },
    /// It is part of another key's translation, or leaves the choice to Trainyard.
    Left {
        /// Which key that is, or why.
        reason: String,
    },
    /// It has no counterpart, and does not change the result of training.
    Ignored {
        /// What it would have changed, and where Trainyard has something similar.
        reason: String,
    },
    /// It has no counterpart and changes the result of training.
    Rejected {
        /// Why there is no counterpart.
        reason: String,
        /// What to do instead.
        remedy: String,
    },
}

/// What a translation depends on beside the file.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct TranslateOptions {
    /// The number of ranks, if a launcher has started them.
    pub world: Option<usize>,
    /// Whether another config describes the model, so that the model of the file and defaults of the framework do
    /// not apply.
    pub has_model: bool,
}

impl Outcome {
    /// Sets one key.
    pub(super) fn set(key: &str, value: impl fmt::Display) -> Outcome {
        Outcome::set_all([(key, value.to_string())])
    }

    /// Sets several keys.
    pub(super) fn set_all<'a>(settings: impl IntoIterator<Item = (&'a str, String)>) -> Outcome {
        let settings = settings.into_iter();
        Outcome::Set {
            settings: settings
                .map(|(key, value)| (key.to_owned(), value))
                .collect(),
            note: String::new(),
        }
    }

    /// Says how the meaning of the keys that were set differs.
    pub(super) fn with_note(self, note: impl Into<String>) -> Outcome {
        match self {
            Outcome::Set { settings, .. } => Outcome::Set {
                settings,
                note: note.into(),
            },
            other => other,
        }
    }

    pub(super) fn left(reason: impl Into<String>) -> Outcome {
        Outcome::Left {
            reason: reason.into(),
        }
    }

    pub(super) fn ignored(reason: impl Into<String>) -> Outcome {
        Outcome::Ignored {
            reason: reason.into(),
        }
    }

    pub(super) fn rejected(reason: impl Into<String>, remedy: impl Into<String>) -> Outcome {
        Outcome::Rejected {
            reason: reason.into(),
            remedy: remedy.into(),
        }
    }
}

impl Translation {
    /// Adds a key.
    pub(super) fn push(
        &mut self,
        key: impl Into<String>,
        value: impl fmt::Display,
        outcome: Outcome,
    ) {
        self.keys.push(TranslatedKey {
            key: key.into(),
            value: shortened(&value.to_string()),
            outcome,
        });
    }

    /// The config overrides, as `--section.key=value`.
    pub fn overrides(&self) -> Vec<String> {
        let settings = self.keys.iter().flat_map(|key| match &key.outcome {
            Outcome::Set { settings, .. } => settings.as_slice(),
            _ => &[],
        });
        settings
            .map(|(key, value)| format!("--{key}={value}"))
            .collect()
    }

    /// The keys that change the result of training, have no counterpart, and are not in `ignored`.
    pub fn rejected<'a>(
        &'a self,
        ignored: &'a [String],
    ) -> impl Iterator<Item = &'a TranslatedKey> + 'a {
        self.keys.iter().filter(move |key| {
            let is_rejected = matches!(key.outcome, Outcome::Rejected { .. });
            is_rejected && !ignored.iter().any(|name| key.is_named(name))
        })
    }

    /// A name in `ignored` that is no key of the file.
    pub fn unknown_name<'a>(&self, ignored: &'a [String]) -> Option<&'a str> {
        let mut names = ignored.iter();
        let unknown = names.find(|name| !self.keys.iter().any(|key| key.is_named(name)));
        unknown.map(String::as_str)
    }
}

impl TranslatedKey {
    /// Whether this is the key, or one in the section, that a user names; the dashes of flags may be left out.
    pub fn is_named(&self, name: &str) -> bool {
        let (key, name) = (
            self.key.trim_start_matches('-'),
            name.trim_start_matches('-'),
        );
        let is_below = |rest: &str| rest.is_empty() || rest.starts_with('.');
        !name.is_empty() && key.strip_prefix(name).is_some_and(is_below)
    }

    /// The key with its value, as messages have it.
    pub fn setting(&self) -> String {
        let TranslatedKey { key, value, .. } = self;
        match value.as_str() {
            "" => key.clone(),
            _ if key.starts_with('-') => format!("{key} {value}"),
            _ => format!("{key} = {value}"),
        }
    }
}

impl fmt::Display for TranslatedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.setting())?;
        match &self.outcome {
            Outcome::Set { settings, note } => {
                let settings: Vec<_> = settings
                    .iter()
                    .map(|(key, value)| format!("{key} = {value}"))
                    .collect();
                write!(f, " -> {}", settings.join(", "))?;
                match note.as_str() {
                    "" => Ok(()),
                    note => write!(f, " ({note})"),
                }
            }
            Outcome::Left { reason } => write!(f, ": {reason}"),
            Outcome::Ignored { reason } => write!(f, ": no counterpart, ignored: {reason}"),
            Outcome::Rejected { reason, remedy } => {
                write!(f, ": no counterpart: {reason}; {remedy}")
            }
        }
    }
}

/// A value of a hostile file may be long.
fn shortened(value: &str) -> String {
    const MOST: usize = 80;
    if value.chars().count() <= MOST {
        return value.to_owned();
    }
    let head: String = value.chars().take(MOST).collect();
    format!("{head}...")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translation() -> Translation {
        let mut translation = Translation::default();
        translation.push("a.b", 1, Outcome::set("training.steps", 1).with_note("so"));
        translation.push("a.c", "x", Outcome::rejected("why", "do that"));
        translation.push("--d", "", Outcome::rejected("why", "do that"));
        translation.push("e", "y".repeat(200), Outcome::ignored("speed only"));
        translation
    }

    #[test]
    fn keys_are_reported_one_by_one() {
        let lines: Vec<String> = translation().keys.iter().map(ToString::to_string).collect();
        assert_eq!(lines[0], "a.b = 1 -> training.steps = 1 (so)");
        assert_eq!(lines[1], "a.c = x: no counterpart: why; do that");
        assert!(lines[3].ends_with("...: no counterpart, ignored: speed only"));
        assert!(lines[3].len() < 150);
        assert_eq!(translation().overrides(), ["--training.steps=1"]);
    }

    #[test]
    fn a_rejected_key_is_ignored_by_its_name_or_section() {
        let rejected = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            let translation = translation();
            translation.rejected(&names).count()
        };
        assert_eq!(rejected(&[]), 2);
        assert_eq!(rejected(&["a"]), 1);
        assert_eq!(rejected(&["a.c", "d"]), 0);
        assert_eq!(rejected(&["a.", "", "--"]), 2);
        let names = ["a.c".to_owned(), "zzz".to_owned()];
        assert_eq!(translation().unknown_name(&names), Some("zzz"));
    }
}
