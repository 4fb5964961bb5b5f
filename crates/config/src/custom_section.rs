//! `[custom.NAME]`: the keys of a component that a program registers, as a type of that program.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::schema::{Kind, Schema};
use crate::suggest::hint_for_key;
use crate::{Config, ConfigError, Location};

/// The name of the table of all custom sections.
pub(crate) const CUSTOM: &str = "custom";

/// The keys of registered components, by their names.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CustomSections(pub BTreeMap<String, Table>);

impl Config {
    /// The keys of component `name`; keys that the type does not have are rejected.
    ///
    /// ```
    /// #[derive(serde::Deserialize)]
    /// struct Keys {
    ///     width: usize,
    /// }
    /// let config = trainyard_config::Config::parse("[custom.mine]\nwidth = 64", &[])?;
    /// assert_eq!(config.custom_section::<Keys>("mine")?.width, 64);
    /// # Ok::<(), trainyard_config::ConfigError>(())
    /// ```
    pub fn custom_section<T: DeserializeOwned>(&self, name: &str) -> Result<T, ConfigError> {
        let table = self.custom.0.get(name).cloned().unwrap_or_default();
        let path = format!("{CUSTOM}.{name}");
        let (schema, probed) = Schema::of::<T>(&path);
        // A type that the schema cannot describe, or that takes any keys, decides itself.
        if probed.is_ok() && schema.kind(&path) != Some(Kind::Any) {
            check_keys(&schema, &path, &table)?;
        }
        T::deserialize(table).map_err(|error| ConfigError::Custom {
            section: path,
            message: error.message().to_owned(),
        })
    }
}

fn check_keys(schema: &Schema, path: &str, table: &Table) -> Result<(), ConfigError> {
    for (key, value) in table {
        let key = format!("{path}.{key}");
        match value {
            Value::Table(inner) if schema.has_below(&key) => check_keys(schema, &key, inner)?,
            _ if schema.kind(&key).is_some() => {}
            _ => {
                return Err(ConfigError::UnknownKey {
                    place: Location::File {
                        file: format!("[{path}]"),
                        line: None,
                    },
                    hint: hint_for_key(schema, &key),
                    key,
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(default)]
    struct Keys {
        width: u32,
        rates: Vec<f32>,
        betas: [f64; 2],
        depth: NonZeroUsize,
    }

    impl Default for Keys {
        fn default() -> Self {
            Keys {
                width: 8,
                rates: Vec::new(),
                betas: [0.9, 0.99],
                depth: NonZeroUsize::MIN,
            }
        }
    }

    fn keys(text: &str, overrides: &[String]) -> Result<Keys, ConfigError> {
        Config::parse(text, overrides)?.custom_section("mine")
    }

    #[test]
    fn keys_are_typed_and_have_defaults() {
        assert_eq!(keys("", &[]).unwrap(), Keys::default());
        let found = keys("[custom.mine]\nwidth = 3\nrates = [0.5]", &[]).unwrap();
        assert_eq!((found.width, found.rates), (3, vec![0.5]));
        let found = keys(
            "[custom.mine]\nwidth = 3",
            &["--custom.mine.width=4".into()],
        )
        .unwrap();
        assert_eq!(found.width, 4);
        let text = "[custom.mine]\na = 1\nb = 2";
        let any: BTreeMap<String, i64> = Config::parse(text, &[])
            .unwrap()
            .custom_section("mine")
            .unwrap();
        assert_eq!(any.len(), 2);
    }

    #[test]
    fn misspelled_keys_and_wrong_types_are_rejected() {
        let error = keys("[custom.mine]\nwidths = 3", &[])
            .unwrap_err()
            .to_string();
        assert!(error.contains("did you mean custom.mine.width?"), "{error}");
        let error = keys("[custom.mine]\nwidth = \"x\"", &[])
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("[custom.mine]"), "{error}");
        Config::parse("custom.width = 3", &[]).unwrap_err();
    }
}
