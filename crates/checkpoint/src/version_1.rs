//! Checkpoints of version 1: the whole model in one file, the optimiser in another.

use serde::Deserialize;

use crate::foreign::manifest_of;
use crate::manifest::{Manifest, VERSION};
use crate::{CheckpointError, Result, Store, TrainState, model_name, optimizer_name};

const MODEL_FILE: &str = "model.safetensors";
const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// What such a checkpoint always has.
pub(crate) const STATE_FILE: &str = "state.json";

/// What would be the manifest of a checkpoint of version 1.
pub(crate) fn manifest(store: &dyn Store, folder: &str) -> Result<Manifest> {
    let path = format!("{folder}/{STATE_FILE}");
    let described = store.describe(&path);
    let size = store.size(&path)?.unwrap_or(0);
    let text = store.read(&path, 0..size)?;
    let malformed = |error: serde_json::Error| CheckpointError::format(&described, error);

    /// Another version may have other fields, so this one is read by itself first.
    #[derive(Deserialize)]
    struct Versioned {
        version: u64,
    }
    let Versioned { version } = serde_json::from_slice(&text).map_err(malformed)?;
    if version != 1 {
        return Err(CheckpointError::Version {
            path: described,
            found: version,
            known: VERSION,
        });
    }
    let state: TrainState = serde_json::from_slice(&text).map_err(malformed)?;
    let files = [MODEL_FILE.to_owned(), OPTIMIZER_FILE.to_owned()];
    let manifest = manifest_of(store, folder, &files, |file, name| match file {
        MODEL_FILE => model_name(name),
        _ => optimizer_name(name),
    })?;
    Ok(Manifest {
        state: Some(state),
        ..manifest
    })
}
