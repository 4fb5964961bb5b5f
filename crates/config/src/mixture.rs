//! Files that name several datasets and the share of each.
//!
//! ```toml
//! [[source]]
//! path = "books"      # beside this file, unless absolute
//! weight = 0.7
//! ```

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::ConfigError;

/// A dataset in a mixture.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ingredient {
    /// Where it is.
    pub path: PathBuf,
    /// Its share, over the sum of all.
    pub weight: f64,
}

/// Whether a dataset's path names a mixture.
pub fn is_mixture(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "toml")
}

/// The datasets a file names.
pub fn read_mixture(path: &Path) -> Result<Vec<Ingredient>, ConfigError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        source: Vec<Ingredient>,
    }
    let refused = |reason: String| {
        let what = format!("training.dataset_path = {path:?}: {reason}");
        ConfigError::contradiction(
            what,
            "write [[source]] with path and weight for each dataset",
        )
    };
    let text = std::fs::read_to_string(path).map_err(|e| refused(e.to_string()))?;
    let file: File = toml::from_str(&text).map_err(|e| refused(e.to_string()))?;
    let beside = path.parent().unwrap_or(Path::new(""));
    let ingredients = file.source.into_iter();
    Ok(ingredients
        .map(|ingredient| Ingredient {
            path: beside.join(&ingredient.path),
            ..ingredient
        })
        .collect())
}
