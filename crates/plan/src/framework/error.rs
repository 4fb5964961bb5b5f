//! Why a framework's text cannot be read or written.

use trainyard_config::ConfigError;

use super::Framework;

/// Why a framework's text cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameworkError {
    /// Text that is none of the framework's.
    #[error("this is no {framework} config: {reason}")]
    Syntax {
        /// The framework.
        framework: Framework,
        /// What is wrong, and where.
        reason: String,
    },

    /// A key or flag that the framework does not have.
    #[error("{framework} does not know {key}{hint}")]
    UnknownKey {
        /// The framework, which says its version.
        framework: Framework,
        /// The key or flag.
        key: String,
        /// ": did you mean ...?", or nothing.
        hint: String,
    },

    /// A value its key cannot have.
    #[error("{key} = {value} is not {expected}")]
    Value {
        /// The key or flag.
        key: String,
        /// What stands there.
        value: String,
        /// What could.
        expected: &'static str,
    },

    /// Something that the text leaves to whoever starts it.
    #[error("{framework}'s text does not say {what}: {remedy}")]
    Untold {
        /// The framework.
        framework: Framework,
        /// What is not said.
        what: &'static str,
        /// How to say it.
        remedy: String,
    },

    /// Something whose meaning differs, or that cannot run.
    #[error("{framework}: {what}: {why}; {nearest}")]
    Refused {
        /// The framework.
        framework: Framework,
        /// What is refused, as it stands there.
        what: String,
        /// Why.
        why: String,
        /// The nearest thing that works.
        nearest: String,
    },

    /// Text of a config of ours that loading refuses.
    #[error(transparent)]
    Config(#[from] ConfigError),
}
