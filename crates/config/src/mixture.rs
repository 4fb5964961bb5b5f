//! Mixture files: several datasets with their weights.
//!
//! ```toml
//! [[source]]
//! path = "books"      # relative to this file, unless absolute
//! weight = 0.7
//! ```

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::ConfigError;

/// One dataset of a mixture.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixtureEntry {
    /// The path of the dataset.
    pub path: PathBuf,
    /// The weight of the dataset, relative to the sum of all weights.
    pub weight: f64,
}

/// Whether a dataset path names a mixture file.
pub fn is_mixture(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "toml")
}

/// Reads the datasets of a mixture file.
pub fn read_mixture(path: &Path) -> Result<Vec<MixtureEntry>, ConfigError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        source: Vec<MixtureEntry>,
    }
    let rejected = |reason: String| {
        let what = format!("training.dataset_path = {path:?}: {reason}");
        ConfigError::contradiction(
            what,
            "write [[source]] with path and weight for each dataset",
        )
    };
    let text = std::fs::read_to_string(path).map_err(|e| rejected(e.to_string()))?;
    let file: File = toml::from_str(&text).map_err(|e| rejected(e.to_string()))?;
    let beside = path.parent().unwrap_or(Path::new(""));
    let entries = file.source.into_iter();
    Ok(entries
        .map(|entry| MixtureEntry {
            path: beside.join(&entry.path),
            ..entry
        })
        .collect())
}
