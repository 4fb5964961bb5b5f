//! What is refused, where it stands, and what to do instead.

use std::fmt;
use std::path::PathBuf;

/// Where a setting was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A config file.
    File {
        /// The file's name, or `config` for text that came from no file.
        file: String,
        /// Counted from 1; absent when no single line is to blame.
        line: Option<usize>,
    },
    /// An override such as `--training.steps 100`.
    CommandLine,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::File {
                file,
                line: Some(line),
            } => write!(f, "{file}:{line}"),
            Place::File { file, line: None } => f.write_str(file),
            Place::CommandLine => f.write_str("command line"),
        }
    }
}

/// Why a config was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the config {}: {source}", path.display())]
    Read {
        /// The file that was asked for.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The text is not TOML.
    #[error("{place}: not valid TOML: {message}")]
    Syntax {
        /// Where the parser stopped.
        place: Place,
        /// What the parser said.
        message: String,
    },
    /// A section that nobody reads.
    #[error("{place}: unknown section [{section}]: {hint}")]
    UnknownSection {
        /// Where it was written.
        place: Place,
        /// The section's name as written.
        section: String,
        /// The nearest section, or all of them.
        hint: String,
    },
    /// A key that nobody reads.
    #[error("{place}: unknown key {key}: {hint}")]
    UnknownKey {
        /// Where it was written.
        place: Place,
        /// The key with its section, as written.
        key: String,
        /// The nearest key, or the keys of the section.
        hint: String,
    },
    /// A value that the key cannot take.
    #[error("{place}: {key} expects {expected}, not {found}")]
    Value {
        /// Where it was written.
        place: Place,
        /// The key with its section.
        key: String,
        /// What the key takes, with the nearest valid choice if there is one.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A command-line argument that is no override.
    #[error("cannot use the argument {argument:?}: {reason}")]
    Override {
        /// The argument as given.
        argument: String,
        /// What is wrong with it, and how overrides look.
        reason: String,
    },
    /// Settings that cannot all be meant.
    #[error("{conflict}; {remedy}")]
    Contradiction {
        /// The settings and why they do not go together.
        conflict: String,
        /// The nearest valid choice.
        remedy: String,
    },
    /// A setting that is known, but that this version cannot do.
    #[error("{setting}: not built yet in this version; use {alternative}")]
    NotBuilt {
        /// The setting, as `key = value`.
        setting: String,
        /// What does work.
        alternative: &'static str,
    },
    /// The mesh refused the sizes.
    #[error(transparent)]
    Mesh(#[from] trainyard_mesh::MeshError),
    /// A value that TOML cannot express.
    #[error("cannot write the config as TOML: {0}")]
    Write(#[from] toml::ser::Error),
}

impl ConfigError {
    pub(crate) fn contradiction(conflict: impl Into<String>, remedy: impl Into<String>) -> Self {
        ConfigError::Contradiction {
            conflict: conflict.into(),
            remedy: remedy.into(),
        }
    }

    pub(crate) fn not_built(setting: impl Into<String>, alternative: &'static str) -> Self {
        ConfigError::NotBuilt {
            setting: setting.into(),
            alternative,
        }
    }
}
