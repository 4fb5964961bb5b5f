//! Errors of reading and writing framework configs.

use trainyard_config::ConfigError;

use super::Framework;

/// Why a framework's config cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameworkError {
    /// The text is not in the framework's config format.
    #[error("this is not a valid {framework} config: {reason}")]
    Syntax {
        /// The framework.
        framework: Framework,
        /// The parse error, with its position if known.
        reason: String,
    },

    /// A key or flag that the framework does not have.
    #[error("{framework} does not recognize {key}{hint}")]
    UnknownKey {
        /// The framework; its name includes the version.
        framework: Framework,
        /// The key or flag.
        key: String,
        /// A suggestion, `: did you mean ...?`, or an empty string.
        hint: String,
    },

    /// A value that its key does not accept.
    #[error("{key} = {value} is not {expected}")]
    Value {
        /// The key or flag.
        key: String,
        /// The value in the config.
        value: String,
        /// The kind of value that the key accepts.
        expected: &'static str,
    },

    /// A value that the config leaves to the launcher or to the training script.
    #[error("the {framework} config does not set {what}: {remedy}")]
    Unspecified {
        /// The framework.
        framework: Framework,
        /// The missing value.
        what: &'static str,
        /// How to supply the value.
        remedy: String,
    },

    /// A setting that the planner does not model, or that cannot run.
    #[error("{framework}: {what}: {why}; {nearest}")]
    Unsupported {
        /// The framework.
        framework: Framework,
        /// The rejected setting, as the config has it.
        what: String,
        /// Why the setting is rejected.
        why: String,
        /// The nearest setting that works.
        nearest: String,
    },

    /// A Trainyard config that is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
}
