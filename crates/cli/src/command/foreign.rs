//! Configs of other frameworks: loading, translation and its report.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use trainyard_interop::{Framework, TranslateOptions, Translation};

use super::auto;
use crate::failure::Failure;

/// No real config is larger.
const MAX_BYTES: u64 = 1 << 20;

/// A config of another framework.
#[derive(Debug)]
pub struct ForeignConfig {
    pub path: PathBuf,
    pub framework: Framework,
    pub text: String,
}

/// Loads a config and detects its framework, unless it is given.
pub fn load(path: &Path, framework: Option<Framework>) -> Result<ForeignConfig, Failure> {
    let text = read(path)?;
    let framework = framework.or_else(|| Framework::detect(&text));
    let framework = framework.ok_or_else(|| {
        Failure::new(format!(
            "{}: cannot detect the framework of this config",
            path.display()
        ))
        .hint(
            "it must be a DeepSpeed JSON, an Accelerate YAML, a torchtitan TOML or command line, or a Megatron-LM \
             script; `plan check` takes --framework",
        )
    })?;
    Ok(ForeignConfig {
        path: path.to_owned(),
        framework,
        text,
    })
}

/// Loads a TOML that only torchtitan accepts. Others, and files that cannot be read, are left to our own loader.
pub fn load_torchtitan(path: &Path) -> Option<ForeignConfig> {
    let found = load(path, None).ok()?;
    (found.framework == Framework::Torchtitan).then_some(found)
}

fn read(path: &Path) -> Result<String, Failure> {
    let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", path.display()));
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(Failure::new(format!(
            "{}: a config has at most {MAX_BYTES} bytes",
            path.display()
        )));
    }
    Ok(text)
}

impl ForeignConfig {
    /// The config overrides of this file, after a report of every key. Fails if a key that changes the result has no
    /// counterpart and is not in `ignored`.
    pub fn translate(&self, ignored: &[String], has_model: bool) -> Result<Vec<String>, Failure> {
        if self.framework == Framework::Trainyard {
            return Err(Failure::usage(format!(
                "--from {} is a Trainyard config",
                self.path.display()
            ))
            .hint("train it directly, as in `trainyard train CONFIG.toml`"));
        }
        if !has_model && !self.framework.describes_models() {
            return Err(Failure::usage(format!(
                "{}: a config of {} does not describe the model",
                self.path.display(),
                self.framework
            ))
            .hint(
                "add a Trainyard config that does, as in `trainyard train model.toml --from FILE`",
            ));
        }
        let options = TranslateOptions {
            world: auto::launched_world_size(),
            has_model,
        };
        let translation = self.translation(&options)?;
        if let Some(name) = translation.unknown_name(ignored) {
            return Err(Failure::usage(format!(
                "--ignore {name}: {} has no such key",
                self.path.display()
            )));
        }
        if is_first_rank() {
            eprint!("{}", self.report(&translation, ignored));
        }
        self.check(&translation, ignored)?;
        Ok(translation.overrides())
    }

    /// The translation, with the file's name in errors.
    pub fn translation(&self, options: &TranslateOptions) -> Result<Translation, Failure> {
        let translated = self.framework.translate(&self.text, options);
        translated.map_err(|error| Failure::new(format!("{}: {error}", self.path.display())))
    }

    /// One line for every key.
    pub fn report(&self, translation: &Translation, ignored: &[String]) -> String {
        let mut report = format!("{} ({}):\n", self.path.display(), self.framework);
        for key in &translation.keys {
            let is_ignored = ignored.iter().any(|name| key.is_named(name));
            let end = if is_ignored { " [--ignore]" } else { "" };
            report += &format!("  {key}{end}\n");
        }
        report
    }

    fn check(&self, translation: &Translation, ignored: &[String]) -> Result<(), Failure> {
        let rejected: Vec<_> = translation.rejected(ignored).collect();
        if rejected.is_empty() {
            return Ok(());
        }
        let lines: Vec<String> = rejected.iter().map(|key| format!("\n  {key}")).collect();
        let names: Vec<String> = rejected
            .iter()
            .map(|key| format!("--ignore {}", key.key.trim_start_matches('-')))
            .collect();
        let message = format!(
            "{}: keys that change the result of training have no counterpart:{}",
            self.path.display(),
            lines.concat()
        );
        let hint = format!(
            "change the file, or train without them: {}",
            names.join(" ")
        );
        Err(Failure::new(message).hint(hint))
    }
}

/// All ranks of a job would report the same.
fn is_first_rank() -> bool {
    std::env::var("RANK").map_or(true, |rank| rank == "0")
}
