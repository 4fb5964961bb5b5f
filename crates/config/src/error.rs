//! Config errors: the location, the reason, and the remedy.

use std::fmt;
use std::path::PathBuf;

/// Where a setting was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A config file.
    File {
        /// The name of the file, or `config` for text.
        file: String,
        /// The line, counted from 1; absent if the error has no single line.
        line: Option<usize>,
    },
    /// An override such as `--training.steps 100`.
    CommandLine,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::File {
                file,
                line: Some(line),
            } => write!(f, "{file}:{line}"),
            Location::File { file, line: None } => f.write_str(file),
            Location::CommandLine => f.write_str("command line"),
        }
    }
}

/// A config that was rejected, and why.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the config {}: {source}", path.display())]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The text is not TOML.
    #[error("{place}: not valid TOML: {message}")]
    Syntax {
        /// Where the parser failed.
        place: Location,
        /// The error of the parser.
        message: String,
    },
    /// An unknown section.
    #[error("{place}: unknown section [{section}]: {hint}")]
    UnknownSection {
        /// Where it was written.
        place: Location,
        /// The name of the section, as written.
        section: String,
        /// The nearest section, or all of them.
        hint: String,
    },
    /// An unknown key.
    #[error("{place}: unknown key {key}: {hint}")]
    UnknownKey {
        /// Where it was written.
        place: Location,
        /// The key with its section, as written.
        key: String,
        /// The nearest key, or the keys of the section.
        hint: String,
    },
    /// An invalid value.
    #[error("{place}: {key} expects {expected}, not {found}")]
    Value {
        /// Where it was written.
        place: Location,
        /// The key with its section.
        key: String,
        /// The type of the key, with the nearest valid choice if there is one.
        expected: String,
        /// The given value.
        found: String,
    },
    /// The keys of a component that a program registers.
    #[error("[{section}]: {message}")]
    Custom {
        /// The section.
        section: String,
        /// The error of its type.
        message: String,
    },
    /// A command-line argument that is not an override.
    #[error("cannot use the argument {argument:?}: {reason}")]
    Override {
        /// The argument as given.
        argument: String,
        /// What is wrong with it, and how overrides look.
        reason: String,
    },
    /// Settings that contradict each other.
    #[error("{conflict}; {remedy}")]
    Contradiction {
        /// The settings and why they contradict each other.
        conflict: String,
        /// The nearest valid choice.
        remedy: String,
    },
    /// A setting that is known, but not supported.
    #[error("{setting} is not supported yet; use {alternative}")]
    NotBuilt {
        /// The setting, as `key = value`.
        setting: String,
        /// A supported alternative.
        alternative: &'static str,
    },
    /// The mesh rejected the degrees.
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
