//! `trainyard new`: a crate with a model and a dataset of one's own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use toml::{Table, Value};

use crate::failure::Failure;

/// The folder of the clone from which this program was built.
const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Create a crate with a model and a dataset of your own
///
/// The crate registers both by name, and has everything that `trainyard train` has: config file, strategies,
/// checkpoints, verify, dry runs, elasticity.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    trainyard new mine && cd mine && cargo build --release\n  \
    trainyard run --standalone --nproc-per-node 2 -- target/release/mine config.toml")]
pub struct New {
    /// The folder of the new crate; its last part is the name of the crate
    path: PathBuf,
    /// The clone of Trainyard that the crate depends on; by default the one that this program was built from
    #[arg(long, value_name = "FOLDER")]
    source: Option<PathBuf>,
}

impl New {
    /// Writes the files.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let name = crate_name(&self.path)?;
        if self.path.exists() {
            return Err(Failure::new(format!("{} exists", self.path.display()))
                .hint("choose another folder, or remove it"));
        }
        let source = self.source.unwrap_or_else(|| PathBuf::from(SOURCE));
        let source = source.canonicalize().map_err(|error| {
            Failure::new(format!("{}: {error}", source.display()))
                .hint("clone Trainyard, run its ./setup, and name the clone with --source")
        })?;
        let cargo_config = cargo_config(&source)?;
        for (file, text) in files(&name, &source, &cargo_config) {
            write(&self.path.join(file), &text)?;
        }
        // The versions that Trainyard is tested with.
        if let Ok(lock) = fs::read_to_string(source.join("Cargo.lock")) {
            write(&self.path.join("Cargo.lock"), &lock)?;
        }
        println!(
            "created {}\n\n  cd {}\n  cargo build --release\n  trainyard run --standalone --nproc-per-node 2 -- \
             target/release/{name} config.toml",
            self.path.display(),
            self.path.display()
        );
        Ok(ExitCode::SUCCESS)
    }
}

/// The name of the crate, if the folder's name is one.
fn crate_name(path: &Path) -> Result<String, Failure> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_valid = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '-');
    if is_valid {
        return Ok(name.into_owned());
    }
    Err(Failure::new(format!("{name:?} is not the name of a crate"))
        .hint("use lowercase letters, digits, `-` and `_`, as in `trainyard new my-model`"))
}

/// The part of the clone's cargo config that finds libtorch.
fn cargo_config(source: &Path) -> Result<String, Failure> {
    let path = source.join(".cargo/config.toml");
    let text = fs::read_to_string(&path).map_err(|error| {
        Failure::new(format!("{}: {error}", path.display()))
            .hint("run ./setup in the clone, which installs libtorch and writes this file")
    })?;
    let mut table: Table = text.parse().map_err(Failure::new)?;
    let kept = ["env", "build"].map(|key| (key.to_owned(), table.remove(key)));
    let kept = kept
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)));
    let kept: Table = kept.collect();
    Ok(format!(
        "# Where cargo finds libtorch; `./setup --write-config DIR` in the clone of Trainyard writes it anew.\n{kept}"
    ))
}

/// The files of the crate with their texts.
fn files(name: &str, source: &Path, cargo_config: &str) -> [(&'static str, String); 6] {
    let library = source.join("crates/trainyard").display().to_string();
    let dependency = format!("{{ path = {} }}", Value::String(library));
    let filled = |text: &str| {
        text.replace("{{name}}", name)
            .replace("{{dependency}}", &dependency)
    };
    [
        (
            "Cargo.toml",
            filled(include_str!("../../template/Cargo.toml.in")),
        ),
        (
            "src/main.rs",
            filled(include_str!("../../template/src/main.rs")),
        ),
        (
            "tests/verify.rs",
            filled(include_str!("../../template/tests/verify.rs")),
        ),
        (
            "config.toml",
            filled(include_str!("../../template/config.toml")),
        ),
        (".cargo/config.toml", cargo_config.to_owned()),
        // The path of libtorch is that of this machine.
        (
            ".gitignore",
            "/target\n/outputs\n/.cargo/config.toml\n".to_owned(),
        ),
    ]
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let failed = |error| Failure::new(format!("{}: {error}", path.display()));
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    fs::write(path, text).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_crates_only() {
        assert_eq!(crate_name(Path::new("a/my-model2")).unwrap(), "my-model2");
        for bad in ["My", "2nd", "..", "a b", "/"] {
            crate_name(Path::new(bad)).unwrap_err();
        }
    }

    #[test]
    fn nothing_is_left_to_fill_in() {
        for (file, text) in files("mine", Path::new("/clone"), "") {
            assert!(!text.contains("{{"), "{file}: {text}");
        }
    }
}
