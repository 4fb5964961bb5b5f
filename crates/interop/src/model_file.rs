//! Loads a model from a Trainyard config, a `config.json`, or a directory with one.

use std::fs;
use std::path::{Path, PathBuf};

use trainyard_config::{Config, ConfigError};

use trainyard_arch::{ArchError, DecoderConfig};

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelFileError {
    /// The file cannot be read.
    #[error("{path}: {reason}; expected a config TOML, a config.json or a directory with one")]
    Unreadable {
        /// The file's path.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// An invalid Trainyard config.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An invalid `config.json`.
    #[error("{path}: {source}")]
    Decoder {
        /// The file's path.
        path: PathBuf,
        /// The reason.
        source: ArchError,
    },
    /// The model is not a decoder.
    #[error(
        "{path}: the model is not a decoder-only transformer; use one with model.name = \"llama\" or \"gpt2\""
    )]
    NotADecoder {
        /// The file's path.
        path: PathBuf,
    },
}

/// Size limit in bytes: configs are a few kilobytes.
const MAX_BYTES: u64 = 16 << 20;

/// Loads a model from a file or directory.
pub fn load_decoder(path: &Path) -> Result<DecoderConfig, ModelFileError> {
    load_decoder_with(path, &[])
}

/// The same with overrides of keys of `[model]`, such as `--model.moe.num_experts=8`.
pub fn load_decoder_with(
    path: &Path,
    overrides: &[String],
) -> Result<DecoderConfig, ModelFileError> {
    let path = if path.is_dir() {
        path.join("config.json")
    } else {
        path.to_owned()
    };
    let text = read(&path)?;
    let decoder = if path.extension().is_some_and(|end| end == "toml") {
        of_config(&path, &text, overrides)?
    } else if let (false, Some(folder)) = (overrides.is_empty(), path.parent()) {
        let assets = format!("--model.hf_assets_path={}", folder.display());
        of_config(&path, "", &[&[assets][..], overrides].concat())?
    } else {
        DecoderConfig::from_hugging_face(&text).map_err(|source| ModelFileError::Decoder {
            path: path.clone(),
            source,
        })?
    };
    Ok(DecoderConfig {
        name: name(&path).unwrap_or(decoder.name),
        ..decoder
    })
}

fn read(path: &Path) -> Result<String, ModelFileError> {
    let unreadable = |reason: String| ModelFileError::Unreadable {
        path: path.to_owned(),
        reason,
    };
    let length = fs::metadata(path)
        .map_err(|error| unreadable(error.to_string()))?
        .len();
    if length > MAX_BYTES {
        return Err(unreadable(format!(
            "{length} bytes are too many for a config"
        )));
    }
    fs::read_to_string(path).map_err(|error| unreadable(error.to_string()))
}

fn of_config(
    path: &Path,
    text: &str,
    overrides: &[String],
) -> Result<DecoderConfig, ModelFileError> {
    let spec = Config::parse(text, overrides)?.model.resolve()?;
    spec.decoder()
        .cloned()
        .ok_or_else(|| ModelFileError::NotADecoder {
            path: path.to_owned(),
        })
}

/// The name of the file, or of the directory of a `config.json`.
fn name(path: &Path) -> Option<String> {
    let stem = path.file_stem()?.to_str()?;
    let name = match stem {
        "config" => path.parent()?.file_name()?.to_str()?,
        _ => stem,
    };
    Some(name.to_owned())
}
