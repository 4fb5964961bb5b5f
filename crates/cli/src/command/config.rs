//! `trainyard config`: the effective config of a job, and all keys that a config may have.

use std::collections::HashSet;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use trainyard_config::{Config, Key, Location, Setting, keys};

use super::example_configs::example;
use super::{ConfigFile, auto, names};
use crate::failure::Failure;

/// Show the effective config of a job, the keys of all configs, or an example
///
/// With CONFIG.toml, prints every setting of the job as TOML, with its origin: a line of the file, the command line, the
/// planner (`parallelism = "auto"`) or the default. With --keys, prints every key with the values that it takes, its
/// default and its meaning. With --example, prints a config to begin with.
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard config CONFIG.toml --show [--changed] [--json] [--SECTION.KEY VALUE]...\n       \
        trainyard config --keys [SECTION] [--json]\n       \
        trainyard config --example [NAME]",
    after_help = "Examples:\n  \
    trainyard config configs/llama-tiny.toml --show --training.steps 100\n  \
    trainyard config configs/llama-tiny.toml --show --changed\n  \
    trainyard config --keys optimizer\n  \
    trainyard config --example llama-tiny > llama-tiny.toml"
)]
pub struct ShowConfig {
    /// The config file; any key can be overridden as in `--training.steps 100`
    #[arg(value_name = "CONFIG.toml", required_unless_present_any = ["keys", "example"])]
    config: Option<PathBuf>,
    /// Print the effective config
    #[arg(long, required_unless_present_any = ["keys", "example"], conflicts_with = "keys")]
    show: bool,
    /// Print only settings that are not defaults
    #[arg(long, requires = "show")]
    changed: bool,
    /// Print all keys, or those of one section
    #[arg(long, value_name = "SECTION", num_args = 0..=1, default_missing_value = "", conflicts_with = "config")]
    keys: Option<String>,
    /// Print an example, or the names of all examples
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "", conflicts_with_all = ["config", "show", "keys"])]
    example: Option<String>,
    /// Print JSON
    #[arg(long, conflicts_with = "example")]
    json: bool,
}

impl ShowConfig {
    /// Prints settings or keys.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode, Failure> {
        let text = if let Some(name) = self.example {
            example(&name)?
        } else if self.show {
            let file = ConfigFile {
                config: self.config.unwrap_or_default(),
            };
            let mut settings = settings(&file, overrides)?;
            settings.retain(|setting| !self.changed || setting.origin != DEFAULT);
            settings_text(&settings, self.json)
        } else {
            keys_text(&keys_of(&self.keys.unwrap_or_default())?, self.json)
        };
        println!("{}", text.trim_end());
        Ok(ExitCode::SUCCESS)
    }
}

const DEFAULT: &str = "default";

/// A setting with its origin as text.
struct Shown {
    setting: Setting,
    origin: String,
}

/// The settings of a job. What the planner chooses overrides the others.
fn settings(file: &ConfigFile, overrides: &[String]) -> Result<Vec<Shown>, Failure> {
    let config = file.load(overrides)?;
    let chosen = auto::choice(&config, auto::world_size())?;
    let planned: HashSet<&str> = chosen
        .iter()
        .filter_map(|arg| arg.strip_prefix("--"))
        .collect();
    let all = [overrides, &chosen].concat();
    let settings = Config::settings(&file.config, &all, &names()).map_err(Failure::new)?;
    let shown = settings.into_iter().map(|setting| Shown {
        origin: match &setting.origin {
            None => DEFAULT.to_owned(),
            Some(Location::CommandLine) if planned.contains(setting.key.as_str()) => {
                "planner".to_owned()
            }
            Some(place) => place.to_string(),
        },
        setting,
    });
    Ok(shown.collect())
}

/// TOML with the origins as comments.
fn settings_text(settings: &[Shown], is_json: bool) -> String {
    if is_json {
        let all = settings.iter().map(|Shown { setting, origin }| {
            json!({ "key": setting.key, "value": setting.value, "origin": origin })
        });
        return serde_json::Value::from_iter(all).to_string();
    }
    let lines: Vec<(&str, String)> = settings
        .iter()
        .map(|Shown { setting, .. }| {
            let (section, name) = setting.key.rsplit_once('.').unwrap_or(("", &setting.key));
            (section, format!("{name} = {}", setting.value))
        })
        .collect();
    let width = lines.iter().map(|(_, line)| line.chars().count());
    let width = width.max().unwrap_or(0).min(MAX_WIDTH);
    let (mut text, mut last) = (String::new(), "");
    for ((section, line), Shown { origin, .. }) in lines.iter().zip(settings) {
        if std::mem::replace(&mut last, section) != *section {
            let _ = write!(text, "\n[{section}]\n");
        }
        let _ = writeln!(text, "{line:width$}  # {origin}");
    }
    text.trim_start().to_owned()
}

/// Longer settings do not move the origins of all others.
const MAX_WIDTH: usize = 60;

/// The keys of a section and of the sections in it; all if it has no name.
fn keys_of(section: &str) -> Result<Vec<Key>, Failure> {
    let is_in = |key: &Key| {
        let rest = key.section().strip_prefix(section);
        section.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let found: Vec<Key> = keys().into_iter().filter(is_in).collect();
    if found.is_empty() {
        let mut sections: Vec<&str> = keys().iter().map(Key::section).collect();
        sections.dedup();
        let message = format!("there is no section [{section}]");
        return Err(
            Failure::usage(message).hint(format!("the sections are {}", sections.join(", ")))
        );
    }
    Ok(found)
}

fn keys_text(keys: &[Key], is_json: bool) -> String {
    if is_json {
        return serde_json::to_string(keys).unwrap_or_default();
    }
    let (mut text, mut last) = (String::new(), "");
    for key in keys {
        if std::mem::replace(&mut last, key.section()) != key.section() {
            let _ = write!(text, "\n[{}]\n", key.section());
        }
        let default = match &key.default {
            Some(default) => format!("default {default}"),
            None => "no default".to_owned(),
        };
        let _ = writeln!(
            text,
            "{}: {}; {default}\n    {}",
            key.name(),
            key.expects,
            key.meaning
        );
    }
    text.trim_start().to_owned()
}

/// All keys by section, for the help of commands that take a config.
pub(super) fn keys_by_section() -> String {
    let (mut text, mut last) = (String::new(), "");
    for key in keys() {
        let separator = if std::mem::replace(&mut last, key.section()) == key.section() {
            ", ".to_owned()
        } else {
            format!("\n  {}: ", key.section())
        };
        text.push_str(&separator);
        text.push_str(key.name());
    }
    format!(
        "Config keys, as in --training.steps 100 (`trainyard config --keys` explains them):{text}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_includes_those_in_it() {
        let sections = |section: &str| {
            let mut found: Vec<&str> = keys_of(section).unwrap().iter().map(Key::section).collect();
            found.dedup();
            found
        };
        assert_eq!(sections("optimizer"), ["optimizer"]);
        assert!(sections("model").contains(&"model.moe"));
        assert!(keys_of("optimi").is_err());
    }

    #[test]
    fn what_is_shown_is_the_config_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.toml");
        std::fs::write(
            &path,
            "[training]\nseq_len = 64\n\n[model.moe]\nnum_experts = 4\n",
        )
        .unwrap();
        let file = ConfigFile { config: path };
        let overrides = ["--optimizer.lr=0.5".to_owned()];
        let shown = settings(&file, &overrides).unwrap();
        let text = settings_text(&shown, false);
        assert!(
            text.contains("# default") && text.contains("# command line"),
            "{text}"
        );
        let config = Config::parse(&text, &[]).unwrap();
        assert_eq!(config, file.load(&overrides).unwrap());
    }
}
