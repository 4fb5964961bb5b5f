//! Loads a config file and validates it.
//!
//! Keys are checked against the schema while their lines are known; then overrides are applied, the result becomes a
//! [`Config`], and its settings are validated together.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use toml::de::DeTable;
use toml::{Table, Value};

use crate::custom_section::CUSTOM;
use crate::keys::value_at;
use crate::schema::Schema;
use crate::suggest::{hint_for_key, hint_for_section};
use crate::{Config, ConfigError, Location, Names, overrides};

/// A key of a config with its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// The key with its section, as in `training.steps`.
    pub key: String,
    /// Its value.
    pub value: Value,
    /// Where it was set; `None` for a default.
    pub origin: Option<Location>,
}

/// No real config is larger. Parsed TOML takes a hundred times its text in memory.
const MAX_BYTES: u64 = 256 << 10;

impl Config {
    /// Reads a config file, applies overrides such as `--training.steps 100`, and validates the result.
    pub fn load(path: impl AsRef<Path>, overrides: &[String]) -> Result<Config, ConfigError> {
        Config::load_with(path, overrides, &Names::builtin())
    }

    /// The same with the names of components that a program registers.
    pub fn load_with(
        path: impl AsRef<Path>,
        overrides: &[String],
        names: &Names,
    ) -> Result<Config, ConfigError> {
        let path = path.as_ref();
        let text = read_file(path)?;
        read(&text, &path.display().to_string(), overrides, names)
    }

    /// The same for text.
    pub fn parse(text: &str, overrides: &[String]) -> Result<Config, ConfigError> {
        Config::parse_with(text, overrides, &Names::builtin())
    }

    /// The same for text, with the names of components that a program registers.
    pub fn parse_with(
        text: &str,
        overrides: &[String],
        names: &Names,
    ) -> Result<Config, ConfigError> {
        read(text, "config", overrides, names)
    }

    /// The settings of a job, as [`Config::load_with`] loads it, with their origins.
    pub fn settings(
        path: impl AsRef<Path>,
        overrides: &[String],
        names: &Names,
    ) -> Result<Vec<Setting>, ConfigError> {
        let path = path.as_ref();
        let text = read_file(path)?;
        let file = path.display().to_string();
        let document = Document::read(&text, &file, overrides, names)?;
        let config = document.config()?;
        config.check()?;
        let mut settings = Vec::new();
        collect_settings("", &Table::try_from(&config)?, &mut settings);
        for setting in &mut settings {
            setting.origin = document.origin(&setting.key);
        }
        Ok(settings)
    }

    /// The config as TOML, defaults included; [`Config::parse`] reads it back.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        Ok(toml::to_string_pretty(self)?)
    }
}

/// The text of a file; of a file that is too large, just enough to detect it.
fn read_file(path: &Path) -> Result<String, ConfigError> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text));
    read.map_err(|source| ConfigError::Read {
        path: path.to_owned(),
        source,
    })?;
    Ok(text)
}

fn read(
    text: &str,
    file: &str,
    arguments: &[String],
    names: &Names,
) -> Result<Config, ConfigError> {
    let config = Document::read(text, file, arguments, names)?.config()?;
    config.check()?;
    Ok(config)
}

/// A parsed file with the line of each key, and the overrides.
struct Document<'a> {
    file: &'a str,
    names: &'a Names,
    table: Table,
    lines: HashMap<String, usize>,
    overridden: HashSet<String>,
}

impl<'a> Document<'a> {
    /// Parses a file, checks its keys and applies overrides.
    fn read(
        text: &str,
        file: &'a str,
        arguments: &[String],
        names: &'a Names,
    ) -> Result<Self, ConfigError> {
        if text.len() as u64 > MAX_BYTES {
            return Err(ConfigError::Syntax {
                place: Location::File {
                    file: file.to_owned(),
                    line: None,
                },
                message: format!("the file is larger than {MAX_BYTES} bytes"),
            });
        }
        let schema = Schema::get();
        let mut document = Document::parse(text, file, names)?;
        document.check(schema)?;
        for (key, value) in overrides::parse(schema, names, arguments)? {
            if key == "training.steps" {
                document.remove("training", "epochs");
            }
            document.set(&key, value)?;
            document.overridden.insert(key);
        }
        Ok(document)
    }

    /// The config, not validated yet.
    fn config(&self) -> Result<Config, ConfigError> {
        Config::deserialize(self.table.clone()).map_err(|error| ConfigError::Syntax {
            place: Location::File {
                file: self.file.to_owned(),
                line: None,
            },
            message: error.message().to_owned(),
        })
    }

    /// Where a key was set; `None` if it has its default.
    fn origin(&self, key: &str) -> Option<Location> {
        if self.overridden.contains(key) {
            return Some(Location::CommandLine);
        }
        value_at(&self.table, key)?;
        // Lines are known of keys, and of the tables in which deeper ones are.
        let ancestors = std::iter::successors(Some(key), |key| Some(key.rsplit_once('.')?.0));
        let line = ancestors
            .filter_map(|key| self.lines.get(key).copied())
            .next();
        Some(Location::File {
            file: self.file.to_owned(),
            line,
        })
    }

    fn parse(text: &str, file: &'a str, names: &'a Names) -> Result<Self, ConfigError> {
        let refuse = |error: toml::de::Error| ConfigError::Syntax {
            place: Location::File {
                file: file.to_owned(),
                line: error.span().map(|span| line_of(text, span.start)),
            },
            message: error.message().to_owned(),
        };
        let mut table: Table = text.parse().map_err(refuse)?;
        spell_out_auto(&mut table);
        Ok(Document {
            file,
            names,
            table,
            lines: lines_of_keys(text, DeTable::parse(text).map_err(refuse)?.get_ref()),
            overridden: HashSet::new(),
        })
    }

    fn place(&self, key: &str) -> Location {
        Location::File {
            file: self.file.to_owned(),
            line: self.lines.get(key).copied(),
        }
    }

    /// Rejects unknown sections and keys, and invalid values.
    fn check(&self, schema: &Schema) -> Result<(), ConfigError> {
        for (section, content) in &self.table {
            match content {
                Value::Table(sections) if section == CUSTOM => self.check_custom(sections)?,
                Value::Table(keys) if schema.sections().any(|known| known == section) => {
                    self.check_keys(schema, section, keys)?;
                }
                Value::Table(_) => {
                    return Err(ConfigError::UnknownSection {
                        place: self.place(section),
                        section: section.clone(),
                        hint: hint_for_section(schema, section),
                    });
                }
                _ => self.check_key(schema, section, content)?,
            }
        }
        Ok(())
    }

    /// The program that registers a component knows its keys.
    fn check_custom(&self, sections: &Table) -> Result<(), ConfigError> {
        match sections.iter().find(|(_, keys)| !keys.is_table()) {
            None => Ok(()),
            Some((key, value)) => Err(ConfigError::Value {
                place: self.place(&format!("{CUSTOM}.{key}")),
                key: format!("{CUSTOM}.{key}"),
                expected: format!("a table of keys, as in [{CUSTOM}.{key}]"),
                found: value.to_string(),
            }),
        }
    }

    fn check_keys(&self, schema: &Schema, path: &str, keys: &Table) -> Result<(), ConfigError> {
        for (key, value) in keys {
            let path = format!("{path}.{key}");
            match value {
                Value::Table(keys) if schema.has_below(&path) => {
                    self.check_keys(schema, &path, keys)?;
                }
                _ => self.check_key(schema, &path, value)?,
            }
        }
        Ok(())
    }

    fn check_key(&self, schema: &Schema, key: &str, value: &Value) -> Result<(), ConfigError> {
        let Some(kind) = schema.kind(key) else {
            return Err(ConfigError::UnknownKey {
                place: self.place(key),
                key: key.to_owned(),
                hint: hint_for_key(schema, key),
            });
        };
        if self.names.accept(key, kind, value) {
            return Ok(());
        }
        Err(ConfigError::Value {
            place: self.place(key),
            key: key.to_owned(),
            expected: self
                .names
                .describe(key, kind, value.as_str().unwrap_or_default()),
            found: value.to_string(),
        })
    }

    fn remove(&mut self, section: &str, key: &str) {
        if let Some(Value::Table(section)) = self.table.get_mut(section) {
            section.remove(key);
        }
    }

    /// Applies an override. The schema knows its key, unless it is one of a registered component.
    fn set(&mut self, key: &str, value: Value) -> Result<(), ConfigError> {
        let Some((path, name)) = key.rsplit_once('.') else {
            return Ok(());
        };
        let mut table = &mut self.table;
        for part in path.split('.') {
            let inner = table
                .entry(part)
                .or_insert_with(|| Value::Table(Table::new()));
            let Value::Table(inner) = inner else {
                return Err(ConfigError::Override {
                    argument: format!("--{key}"),
                    reason: format!("{part} is a value, not a section"),
                });
            };
            table = inner;
        }
        table.insert(name.to_owned(), value);
        Ok(())
    }
}

/// Appends the keys of a table, and then those of the tables in it, to settings without origins.
fn collect_settings(path: &str, table: &Table, settings: &mut Vec<Setting>) {
    let key_of = |name: &String| match path {
        "" => name.clone(),
        path => format!("{path}.{name}"),
    };
    let is_section = |name: &String, value: &Value| {
        let is_custom = [path, name.as_str()].contains(&CUSTOM);
        value.is_table() && (is_custom || Schema::get().has_below(&key_of(name)))
    };
    let (sections, values): (Vec<_>, Vec<_>) = table
        .iter()
        .partition(|(name, value)| is_section(name, value));
    settings.extend(values.into_iter().map(|(name, value)| Setting {
        key: key_of(name),
        value: value.clone(),
        origin: None,
    }));
    for (name, inner) in sections {
        if let Value::Table(inner) = inner {
            collect_settings(&key_of(name), inner, settings);
        }
    }
}

/// `parallelism = "auto"` is short for a section with `auto = true`.
fn spell_out_auto(table: &mut Table) {
    if table.get("parallelism").and_then(Value::as_str) == Some("auto") {
        let auto = Table::from_iter([("auto".to_owned(), Value::Boolean(true))]);
        table.insert("parallelism".to_owned(), Value::Table(auto));
    }
}

/// The line of every section and key, by dotted name.
fn lines_of_keys(text: &str, table: &DeTable<'_>) -> HashMap<String, usize> {
    let mut lines = HashMap::new();
    for (section, content) in table {
        let name = section.get_ref().to_string();
        for (key, _) in content.get_ref().as_table().into_iter().flatten() {
            let line = line_of(text, key.span().start);
            lines.insert(format!("{name}.{}", key.get_ref()), line);
        }
        lines.insert(name, line_of(text, section.span().start));
    }
    lines
}

fn line_of(text: &str, offset: usize) -> usize {
    let before = text.bytes().take(offset);
    1 + before.filter(|&byte| byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_too_large_is_rejected() {
        let text = "#".repeat(MAX_BYTES as usize);
        Config::parse(&text, &[]).unwrap();
        let error = Config::parse(&(text + "#"), &[]).unwrap_err().to_string();
        assert!(error.contains("larger than"), "{error}");
    }

    fn rejection(text: &str) -> String {
        Config::parse(text, &[]).unwrap_err().to_string()
    }

    #[test]
    fn an_empty_config_is_the_default() {
        assert_eq!(Config::parse("", &[]).unwrap(), Config::default());
    }

    #[test]
    fn unknown_keys_are_refused_with_line_and_suggestion() {
        assert_eq!(
            rejection("[training]\nseq_len = 64\nstep = 3\n"),
            "config:3: unknown key training.step: did you mean training.steps?"
        );
        assert_eq!(
            rejection("steps = 3"),
            "config:1: unknown key steps: did you mean training.steps?"
        );
        assert_eq!(
            rejection("\n[trainig]\nsteps = 3"),
            "config:2: unknown section [trainig]: did you mean [training]?"
        );
    }

    #[test]
    fn values_of_the_wrong_kind_are_refused_with_the_right_one() {
        assert_eq!(
            rejection("[training]\nsteps = \"3\""),
            "config:2: training.steps expects a non-negative integer, not \"3\""
        );
        assert_eq!(
            rejection("[training]\nsteps = -3"),
            "config:2: training.steps expects a non-negative integer, not -3"
        );
        assert_eq!(
            rejection("parallelism.parameter_compression = \"int9\""),
            "config:1: parallelism.parameter_compression expects one of \"none\", \"int8\", \"fp8\" (did you mean \
             \"int8\"?), not \"int9\""
        );
        assert!(rejection("optimizer.name = \"Adam\"").contains("(did you mean \"AdamW\"?)"));
        assert!(rejection("training = 3").starts_with("config:1: unknown key training"));
        assert!(rejection("[[training]]\nsteps = 3").contains("unknown key training"));
    }

    #[test]
    fn bad_toml_is_refused_with_its_line() {
        let message = rejection("[training]\nsteps = = 3");
        assert!(message.starts_with("config:2: not valid TOML"), "{message}");
    }

    #[test]
    fn an_integer_is_a_valid_float() {
        let config = Config::parse("[training]\nmax_norm = 2", &[]).unwrap();
        assert_eq!(config.training.max_norm, 2.0);
    }

    #[test]
    fn a_written_config_is_read_back() {
        let mut config = Config::default();
        config.training.global_batch_size = Some(32);
        config.model.rope_theta = Some(1e6);
        let text = config.to_toml().unwrap();
        assert_eq!(Config::parse(&text, &[]).unwrap(), config);
    }

    #[test]
    fn settings_have_origins() {
        let dir = std::env::temp_dir().join(format!("trainyard-settings-{}", std::process::id()));
        std::fs::write(
            &dir,
            "[training]\nsteps = 9\nseq_len = 64\n\n[model.moe]\nnum_experts = 4\n\n[custom.mine]\nwidth = 1\n",
        )
        .unwrap();
        let overrides = ["--training.steps=7".to_owned()];
        let settings = Config::settings(&dir, &overrides, &Names::builtin()).unwrap();
        std::fs::remove_file(&dir).unwrap();
        let of = |key: &str| {
            let setting = settings.iter().find(|setting| setting.key == key);
            let setting = setting.unwrap_or_else(|| panic!("{key}"));
            let line = setting.origin.as_ref().map(|origin| match origin {
                Location::File { line, .. } => line.unwrap_or(0),
                Location::CommandLine => 0,
            });
            (setting.value.to_string(), line)
        };
        assert_eq!(of("training.steps"), ("7".to_owned(), Some(0)));
        assert_eq!(of("training.seq_len"), ("64".to_owned(), Some(3)));
        assert_eq!(of("training.local_batch_size").1, None);
        assert_eq!(of("model.moe.num_experts"), ("4".to_owned(), Some(5)));
        assert_eq!(of("custom.mine.width").0, "1");
    }

    #[test]
    fn a_missing_file_is_named() {
        let message = Config::load("nowhere.toml", &[]).unwrap_err().to_string();
        assert!(message.starts_with("cannot read the config nowhere.toml"));
    }
}
