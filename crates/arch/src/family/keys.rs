//! The keys of a `config.json`, read by name and type.

use serde_json::{Map, Value};

use crate::ArchError;

/// The keys of a `config.json`. A key that is null counts as absent.
#[derive(Debug)]
pub(super) struct Keys {
    map: Map<String, Value>,
    /// The model type, for messages.
    family: String,
}

impl Keys {
    pub(super) fn parse(text: &str) -> Result<Keys, ArchError> {
        let map: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| ArchError::Syntax(error.to_string()))?;
        Keys::new(map)
    }

    pub(super) fn new(map: Map<String, Value>) -> Result<Keys, ArchError> {
        let mut keys = Keys {
            map,
            family: String::new(),
        };
        keys.family = match keys.text("model_type")? {
            Some(family) => family.to_owned(),
            None => return Err(ArchError::Syntax("it has no model_type".to_owned())),
        };
        Ok(keys)
    }

    pub(super) fn family(&self) -> &str {
        &self.family
    }

    pub(super) fn map(&self) -> &Map<String, Value> {
        &self.map
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// The value of a key, converted by `convert`, which fails for another type than `kind`.
    fn typed<'a, T>(
        &'a self,
        key: &str,
        kind: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ArchError> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let converted = convert(value);
        converted
            .map(Some)
            .ok_or_else(|| ArchError::Syntax(format!("{key} = {value} is not {kind}")))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<usize>, ArchError> {
        let number = |value: &Value| usize::try_from(value.as_u64()?).ok();
        self.typed(key, "a whole number", number)
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, ArchError> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ArchError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, ArchError> {
        self.typed(key, "a text", Value::as_str)
    }

    pub(super) fn array(&self, key: &str) -> Result<Option<&Vec<Value>>, ArchError> {
        self.typed(key, "a list", Value::as_array)
    }

    /// A nested object; its messages name this family.
    pub(super) fn object(&self, key: &str) -> Result<Option<Keys>, ArchError> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Keys {
            map: map.clone(),
            family: self.family.clone(),
        }))
    }

    pub(super) fn need(&self, key: &str) -> Result<usize, ArchError> {
        self.number(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn missing(&self, key: &str) -> ArchError {
        ArchError::Missing {
            family: self.family.clone(),
            key: key.to_owned(),
        }
    }

    /// Rejects options that are not built: keys that are set to something else than the given values.
    pub(super) fn refuse_unless(&self, plain: &[(&str, Value)]) -> Result<(), ArchError> {
        for (key, plain) in plain {
            // 1 and 1.0 are the same number.
            let is_plain = |value: &Value| {
                value == plain || value.as_f64().is_some_and(|v| plain.as_f64() == Some(v))
            };
            if let Some(value) = self.value(key).filter(|value| !is_plain(value)) {
                return Err(ArchError::not_built(format!("{key} = {value}")));
            }
        }
        Ok(())
    }
}
