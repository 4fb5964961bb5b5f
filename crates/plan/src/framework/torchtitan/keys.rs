//! torchtitan's settings by their dotted names, wherever they were written.

use std::collections::BTreeMap;

use super::super::arguments::{CommandLine, count};
use super::super::suggest::unknown;
use super::super::{Framework, FrameworkError};

/// The keys of 0.2.2's TOML, as its `JobConfig` has them.
const KEYS_0_2_2: &str = include_str!("keys-0.2.2.txt");

/// The flags of 0.3.0, as the configs of its registry have them.
const KEYS_0_3_0: &str = include_str!("keys-0.3.0.txt");

/// Keys and what they are set to.
#[derive(Debug)]
pub(super) struct Keys {
    pub framework: Framework,
    values: BTreeMap<String, String>,
}

impl Keys {
    /// The keys of a TOML file.
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

    /// The flags of a command line, and how many ranks it starts.
    pub fn from_command_line(text: &str) -> Result<(Keys, Option<usize>), FrameworkError> {
        let framework = Framework::TorchtitanCommandLine;
        let line = CommandLine::parse(framework, text)?;
        let mut values = BTreeMap::new();
        let mut words = line.arguments.into_iter().peekable();
        while let Some(word) = words.next() {
            let Some(flag) = word.strip_prefix("--") else {
                // A choice between policies is a word of its own: activation_checkpoint:full.
                let Some((key, value)) = word.split_once(':') else {
                    return Err(framework.syntax(format!("{word:?} is no flag")));
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
        Ok((keys, line.world))
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

    /// What a key is set to.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str)
    }

    /// A number of 0 and more.
    pub fn count(&self, key: &str, default: usize) -> Result<usize, FrameworkError> {
        self.get(key).map_or(Ok(default), |value| count(key, value))
    }

    /// A number where -1 stands for none.
    pub fn rest(&self, key: &str, default: Option<usize>) -> Result<Option<usize>, FrameworkError> {
        match self.get(key) {
            None => Ok(default),
            Some("-1") => Ok(None),
            Some(value) => count(key, value).map(Some),
        }
    }

    /// True or false.
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
