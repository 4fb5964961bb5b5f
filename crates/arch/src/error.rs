//! Why a description of a model is rejected.

/// Why a model is rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ArchError {
    /// Invalid JSON, or a key of another type.
    #[error("not a config.json: {0}")]
    Syntax(String),
    /// An unknown model family.
    #[error("model_type {found:?} is not supported: use one of {known}")]
    Family {
        /// The model type.
        found: String,
        /// The known model types.
        known: String,
    },
    /// A required key is missing.
    #[error("model_type {family:?} needs {key}: add it to config.json")]
    Missing {
        /// The model type.
        family: String,
        /// The missing key.
        key: String,
    },
    /// A value out of range.
    #[error("{key} = {value} is out of range: use 1 to {limit}")]
    Range {
        /// The key.
        key: String,
        /// Its value.
        value: usize,
        /// The largest valid value.
        limit: usize,
    },
    /// Values that contradict each other, or an option that is not built.
    #[error("{what}: {remedy}")]
    Contradiction {
        /// The keys and their values.
        what: String,
        /// What to do.
        remedy: String,
    },
}

impl ArchError {
    pub(crate) fn contradiction(what: impl Into<String>, remedy: impl Into<String>) -> ArchError {
        ArchError::Contradiction {
            what: what.into(),
            remedy: remedy.into(),
        }
    }

    /// An option of a family that no model here has.
    pub(crate) fn not_built(what: impl Into<String>) -> ArchError {
        ArchError::contradiction(what, "this option is not built")
    }
}
