//! The model that is meant: a config of ours, a `config.json`, or a folder with one.

use std::fs;
use std::path::{Path, PathBuf};

use trainyard_config::{Config, ConfigError};

use crate::{Shape, ShapeError};

/// Why a path leads to no shape.
#[derive(Debug, thiserror::Error)]
pub enum ModelFileError {
    /// A file that cannot be read.
    #[error("{path}: {reason}; name a config TOML, a config.json or a folder with one")]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Our own config, refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A `config.json`, refused.
    #[error("{path}: {source}")]
    Shape {
        /// Which.
        path: PathBuf,
        /// Why.
        source: ShapeError,
    },
    /// A model that is no decoder.
    #[error(
        "{path}: its model is no decoder of equal blocks; use one with model.name = \"llama\" or \"gpt2\""
    )]
    NoDecoder {
        /// Which.
        path: PathBuf,
    },
}

/// The largest file that is read: configs have kilobytes.
const MOST_BYTES: u64 = 16 << 20;

impl Shape {
    /// The shape that a path leads to.
    pub fn load(path: &Path) -> Result<Shape, ModelFileError> {
        let path = match path.is_dir() {
            true => path.join("config.json"),
            false => path.to_owned(),
        };
        let text = read(&path)?;
        let mut shape = match path.extension().is_some_and(|end| end == "toml") {
            true => of_config(&path, &text)?,
            false => Shape::from_hugging_face(&text).map_err(|source| ModelFileError::Shape {
                path: path.clone(),
                source,
            })?,
        };
        shape.name = name(&path).unwrap_or(shape.name);
        Ok(shape)
    }
}

fn read(path: &Path) -> Result<String, ModelFileError> {
    let unreadable = |reason: String| ModelFileError::Unreadable {
        path: path.to_owned(),
        reason,
    };
    let length = fs::metadata(path)
        .map_err(|error| unreadable(error.to_string()))?
        .len();
    if length > MOST_BYTES {
        return Err(unreadable(format!("{length} bytes are no config")));
    }
    fs::read_to_string(path).map_err(|error| unreadable(error.to_string()))
}

fn of_config(path: &Path, text: &str) -> Result<Shape, ModelFileError> {
    let spec = Config::parse(text, &[])?.model.resolve()?;
    Shape::try_from(&spec).map_err(|_| ModelFileError::NoDecoder {
        path: path.to_owned(),
    })
}

/// What a file is called, or the folder of a `config.json`.
fn name(path: &Path) -> Option<String> {
    let stem = path.file_stem()?.to_str()?;
    let name = match stem {
        "config" => path.parent()?.file_name()?.to_str()?,
        _ => stem,
    };
    Some(name.to_owned())
}
