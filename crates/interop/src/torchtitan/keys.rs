//! torchtitan's settings by dotted name, from TOML or from a command line.

use std::collections::BTreeMap;

use super::super::arguments::{CommandLine, count};
use super::super::suggest::unknown;
use super::super::{Framework, FrameworkError};

/// The TOML keys of 0.2.2: the fields of its `JobConfig`.
const KEYS_0_2_2: &str = include_str!("keys-0.2.2.txt");

/// The flags of 0.3.0: the fields of the configs in its registry.
const KEYS_0_3_0: &str = include_str!("keys-0.3.0.txt");

/// Keys with their values.
#[derive(Debug)]
pub(super) struct Keys {
    pub framework: Framework,
    values: BTreeMap<String, String>,
}

impl Keys {
    /// Parses a TOML file.
    pub fn from_toml(text: &str) -> Result<Keys, FrameworkError> {
        let framework = Framework::Torchtitan;
        let table: toml::Table = text
            .parse()
            .map_err(|e: toml::de::Error| framework.syntax(e))?;
        let mut values = BTreeMap::new();
        flatten("", table, &mut values);
        let keys = Keys { framework, values };
        keys.check(KEYS_0_2_2, "")?;
        Ok(keys)
    }

    /// Parses a command line. Also returns the number of ranks that it starts, if known.
    pub fn from_command_line(text: &str) -> Result<(Keys, Option<usize>), FrameworkError> {
        let framework = Framework::TorchtitanCommandLine;
        let line = CommandLine::parse(framework, text)?;
        let mut values = BTreeMap::new();
        let world = line.world;
        let mut words = line.readable(framework)?.into_iter().peekable();
        while let Some(word) = words.next() {
            let Some(flag) = word.strip_prefix("--") else {
                // A policy is a separate argument, such as activation_checkpoint:full.
                let Some((key, value)) = word.split_once(':') else {
                    return Err(framework.syntax(format!("{word:?} is not a flag")));
                };
                values.insert(
                    format!("{}:", key.replace('-', "_")),
                    value.replace('-', "_"),
                );
                continue;
            };
            let (flag, inline) = match flag.split_once('=') {
                Some((flag, value)) => (flag, Some(value.to_owned())),
                None => (flag, None),
            };
            let flag = flag.replace('-', "_");
            let value = inline
                .or_else(|| words.next_if(|next| !next.starts_with("--") && !next.contains(':')));
            let (flag, value) = match (flag.rsplit_once(".no_"), value) {
                (Some((section, key)), None) => (format!("{section}.{key}"), "false".to_owned()),
                (_, value) => (flag, value.unwrap_or_else(|| "true".to_owned())),
            };
            values.insert(flag, value);
        }
        let keys = Keys { framework, values };
        keys.check(KEYS_0_3_0, "--")?;
        Ok((keys, world))
    }

    fn check(&self, known: &str, prefix: &str) -> Result<(), FrameworkError> {
        let extra = ["module", "config", "activation_checkpoint:"];
        for key in self.values.keys() {
            let is_known = known.lines().any(|line| line == key) || extra.contains(&key.as_str());
            if !is_known {
                return Err(unknown(
                    self.framework,
                    &format!("{prefix}{key}"),
                    known.lines(),
                ));
            }
        }
        Ok(())
    }

    /// Sets a key that is absent. Returns whether it was.
    pub fn set_default(&mut self, key: &str, value: &str) -> bool {
        let is_absent = !self.values.contains_key(key);
        if is_absent {
            self.values.insert(key.to_owned(), value.to_owned());
        }
        is_absent
    }

    /// All keys with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let values = self.values.iter();
        values.map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str)
    }

    /// The value of a key as a whole number.
    pub fn count(&self, key: &str, default: usize) -> Result<usize, FrameworkError> {
        self.get(key).map_or(Ok(default), |value| count(key, value))
    }

    /// The value of a key as a whole number, with `None` for -1.
    pub fn rest(&self, key: &str, default: Option<usize>) -> Result<Option<usize>, FrameworkError> {
        match self.get(key) {
            None => Ok(default),
            Some("-1") => Ok(None),
            Some(value) => count(key, value).map(Some),
        }
    }

    /// The value of a key as a Boolean.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool, FrameworkError> {
        match self.get(key).map(str::to_ascii_lowercase).as_deref() {
            None => Ok(default),
            Some("true") => Ok(true),
            Some("false") => Ok(false),
            Some(value) => Err(FrameworkError::Value {
                key: key.to_owned(),
                value: value.to_owned(),
                expected: "true or false",
            }),
        }
    }
}

fn flatten(prefix: &str, table: toml::Table, values: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        let path = match prefix {
            "" => key,
            prefix => format!("{prefix}.{key}"),
        };
        match value {
            toml::Value::Table(inner) => flatten(&path, inner, values),
            toml::Value::String(text) => drop(values.insert(path, text)),
            other => drop(values.insert(path, other.to_string())),
        }
    }
}
