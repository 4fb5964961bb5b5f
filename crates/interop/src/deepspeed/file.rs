//! A parsed JSON config, with typed access by dotted key.

use serde_json::Value;

use super::super::FrameworkError;
use super::FRAMEWORK;

/// The value with which Hugging Face's integration leaves a key to its `Trainer`.
pub(super) const AUTO: &str = "auto";

/// The largest number that JSON's floats, as in `5e8`, represent exactly.
const MOST: f64 = 9_007_199_254_740_992.0;

/// The parsed file.
#[derive(Debug)]
pub(in super::super) struct File {
    root: Value,
}

impl File {
    pub fn parse(text: &str) -> Result<File, FrameworkError> {
        let root: Value = serde_json::from_str(text).map_err(|error| FRAMEWORK.syntax(error))?;
        File::new(root)
    }

    /// A file of values that another format had.
    pub fn new(root: Value) -> Result<File, FrameworkError> {
        if root.is_object() {
            Ok(File { root })
        } else {
            Err(FRAMEWORK.syntax("the top level must be an object"))
        }
    }

    /// The value of a key; none if it is absent, null or `"auto"`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let mut parts = key.split('.');
        let value = parts.try_fold(&self.root, |value, part| value.get(part))?;
        (!value.is_null() && value != AUTO).then_some(value)
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        self.get(key).and_then(Value::as_str)
    }

    /// Whether the file has the key, even as `"auto"`.
    pub fn has(&self, key: &str) -> bool {
        let mut parts = key.split('.');
        let value = parts.try_fold(&self.root, |value, part| value.get(part));
        value.is_some()
    }

    pub fn count(&self, key: &str) -> Result<Option<usize>, FrameworkError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let number = whole(value).ok_or_else(|| invalid(key, value, "a whole number"))?;
        Ok(Some(number))
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, FrameworkError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let number = value
            .as_f64()
            .ok_or_else(|| invalid(key, value, "a number"))?;
        Ok(Some(number))
    }

    pub fn flag(&self, key: &str) -> Result<bool, FrameworkError> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(invalid(key, value, "true or false")),
        }
    }

    /// Every key that holds a value rather than a section, with its dotted name.
    pub fn leaves(&self) -> Vec<(String, &Value)> {
        let mut leaves = Vec::new();
        collect("", &self.root, &mut leaves);
        leaves
    }
}

fn collect<'a>(path: &str, value: &'a Value, leaves: &mut Vec<(String, &'a Value)>) {
    match value {
        Value::Object(keys) if path.is_empty() || !keys.is_empty() => {
            for (key, value) in keys {
                let path = match path {
                    "" => key.clone(),
                    path => format!("{path}.{key}"),
                };
                collect(&path, value, leaves);
            }
        }
        value => leaves.push((path.to_owned(), value)),
    }
}

/// A whole number, which tutorials also write as `5e8`.
pub(in super::super) fn whole(value: &Value) -> Option<usize> {
    if let Some(number) = value.as_u64() {
        return usize::try_from(number).ok();
    }
    let number = value.as_f64()?;
    let is_whole = number.fract() == 0.0 && (0.0..=MOST).contains(&number);
    is_whole.then_some(number as usize)
}

pub(in super::super) fn invalid(
    key: &str,
    value: &Value,
    expected: &'static str,
) -> FrameworkError {
    FrameworkError::Value {
        key: key.to_owned(),
        value: value.to_string().chars().take(80).collect(),
        expected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_by_their_dotted_names() {
        let text = r#"{"a": {"b": 5e8, "c": "auto", "d": {}}, "e": [1, 2], "f": null, "g": 0.5}"#;
        let file = File::parse(text).unwrap();
        assert_eq!(file.count("a.b").unwrap(), Some(500_000_000));
        assert_eq!((file.get("a.c"), file.has("a.c")), (None, true));
        assert_eq!((file.get("f"), file.has("x")), (None, false));
        assert!(file.count("g").is_err() && file.flag("g").is_err());
        let keys: Vec<String> = file.leaves().into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys, ["a.b", "a.c", "a.d", "e", "f", "g"]);
        assert!(File::parse("[]").is_err());
    }
}
