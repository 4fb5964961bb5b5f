//! The names of components that a program registers beside those of Trainyard.

use toml::Value;

use crate::schema::{Kind, Schema};

/// Which names a config may use.
#[derive(Clone, Debug, Default)]
pub struct Names {
    registered: Vec<(&'static str, String)>,
    any: bool,
}

impl Names {
    /// The components of Trainyard only.
    pub fn builtin() -> Names {
        Names::default()
    }

    /// Any name: for programs that pass a config on and do not build what it names.
    pub fn any() -> Names {
        Names {
            any: true,
            ..Names::default()
        }
    }

    /// Also allows `name` as the value of `key`.
    pub fn with(mut self, key: &'static str, name: impl Into<String>) -> Names {
        self.registered.push((key, name.into()));
        self
    }

    /// Whether programs may register values of a key.
    pub fn may_register(key: &str) -> bool {
        matches!(Schema::get().kind(key), Some(Kind::Open(_)))
    }

    /// Whether a value is valid for a key of this type.
    pub(crate) fn accept(&self, key: &str, kind: Kind, value: &Value) -> bool {
        match (kind, value) {
            (Kind::Open(_), Value::String(text)) => {
                self.any || kind.accepts(value) || self.of(key).any(|name| name == text)
            }
            _ => kind.accepts(value),
        }
    }

    /// Describes the values that are valid; `given` selects the nearest choice.
    pub(crate) fn describe(&self, key: &str, kind: Kind, given: &str) -> String {
        kind.describe(given, &self.of(key).collect::<Vec<_>>())
    }

    fn of<'a>(&'a self, key: &str) -> impl Iterator<Item = &'a str> {
        // Validation takes the datasets of training.
        let key = match key {
            "validation.dataset" => "training.dataset",
            key => key,
        }
        .to_owned();
        let registered = self.registered.iter();
        registered.filter_map(move |(known, name)| (*known == key).then_some(name.as_str()))
    }
}
