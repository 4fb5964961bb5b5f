//! Weights as Hugging Face has them: safetensors files of whole tensors, and an index where there are
//! several.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use trainyard_mesh::Slice;

use crate::foreign::manifest_of;
use crate::load::Checkpoint;
use crate::manifest::{Manifest, TensorEntry};
use crate::neighbours::neighbours;
use crate::shard::{Elements, Part, write_shard};
use crate::{CheckpointError, MODEL, Result, Store, model_name};

const ONE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Tables that old files have and that follow from the config.
const DERIVED: &str = "rotary_emb.inv_freq";
/// No honest index is larger.
const MAX_INDEX: u64 = 100_000_000;

/// Which file has which tensor.
#[derive(Serialize, Deserialize)]
struct Index {
    #[serde(default)]
    metadata: serde_json::Value,
    weight_map: BTreeMap<String, String>,
}

/// What would be the manifest of a folder of Hugging Face's; none if it is none.
pub(crate) fn manifest(store: &dyn Store, folder: &str) -> Result<Option<Manifest>> {
    let Some(files) = files(store, folder)? else {
        return Ok(None);
    };
    let mut manifest = manifest_of(store, folder, &files, |_, name| model_name(name))?;
    manifest.tensors.retain(|name, _| !name.ends_with(DERIVED));
    Ok(Some(manifest))
}

fn files(store: &dyn Store, folder: &str) -> Result<Option<Vec<String>>> {
    let path = format!("{folder}/{INDEX}");
    let Some(size) = store.size(&path)? else {
        let one = store.size(&format!("{folder}/{ONE_FILE}"))?;
        return Ok(one.map(|_| vec![ONE_FILE.to_owned()]));
    };
    let described = store.describe(&path);
    if size > MAX_INDEX {
        return Err(CheckpointError::format(
            &described,
            "too large for an index",
        ));
    }
    let text = store.read(&path, 0..size)?;
    let index: Index =
        serde_json::from_slice(&text).map_err(|e| CheckpointError::format(&described, e))?;
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    Ok(Some(files.into_iter().collect()))
}

/// Writes the parameters of a checkpoint as Hugging Face has them: whole, in files of up to
/// `max_bytes`, with a `config.json` beside them.
pub fn export(
    checkpoint: &Checkpoint,
    to: &Arc<dyn Store>,
    config_json: &str,
    max_bytes: u64,
) -> Result<()> {
    let tensors: Vec<(&str, &TensorEntry)> = checkpoint
        .manifest()
        .tensors
        .iter()
        .filter_map(|(name, tensor)| Some((name.strip_prefix(MODEL)?, tensor)))
        .collect();
    let size = |(_, tensor): &(&str, &TensorEntry)| tensor.num_bytes().unwrap_or(0);
    let groups = neighbours(&tensors, max_bytes, size);
    remove_old(&**to)?;
    let mut weight_map = BTreeMap::new();
    let mut total = 0;
    for (number, group) in groups.iter().enumerate() {
        let file = match groups.len() {
            1 => ONE_FILE.to_owned(),
            all => format!("model-{:05}-of-{all:05}.safetensors", number + 1),
        };
        let parts: Vec<Part> = group
            .iter()
            .map(|(name, tensor)| part(name, tensor))
            .collect();
        total += parts.iter().filter_map(Part::num_bytes).sum::<u64>();
        let elements = FromCheckpoint::new(checkpoint, &parts);
        write_shard(&**to, ".", &file, &parts, &elements)?;
        weight_map.extend(parts.into_iter().map(|part| (part.name, file.clone())));
    }
    if groups.len() > 1 {
        let index = Index {
            metadata: serde_json::json!({ "total_size": total }),
            weight_map,
        };
        let text =
            serde_json::to_vec_pretty(&index).map_err(|e| CheckpointError::format(INDEX, e))?;
        to.put(INDEX, &text)?;
    }
    to.put("config.json", config_json.as_bytes())
}

/// Deletes weights that were written here before, the index first: they must not be taken for these.
fn remove_old(store: &dyn Store) -> Result<()> {
    store.remove(INDEX)?;
    for name in store.list(".")? {
        let is_shard = name.starts_with("model-") && name.ends_with(".safetensors");
        if is_shard || name == ONE_FILE {
            store.remove(&name)?;
        }
    }
    Ok(())
}

fn part(name: &str, tensor: &TensorEntry) -> Part {
    Part {
        name: name.to_owned(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        slice: Slice::whole(&tensor.shape),
    }
}

/// Whole tensors of a checkpoint, one at a time in memory.
struct FromCheckpoint<'a> {
    checkpoint: &'a Checkpoint,
    parts: &'a [Part],
    /// The one that was asked for last.
    current: Mutex<Option<(usize, Vec<u8>)>>,
}

impl<'a> FromCheckpoint<'a> {
    fn new(checkpoint: &'a Checkpoint, parts: &'a [Part]) -> FromCheckpoint<'a> {
        FromCheckpoint {
            checkpoint,
            parts,
            current: Mutex::new(None),
        }
    }
}

impl Elements for FromCheckpoint<'_> {
    fn copy(&self, index: usize, start: usize, into: &mut [u8]) -> io::Result<()> {
        let mut current = self.current.lock().unwrap_or_else(|e| e.into_inner());
        if current.as_ref().is_none_or(|(held, _)| *held != index) {
            let whole = self.checkpoint.whole(&model_name(&self.parts[index].name));
            *current = Some((index, whole.map_err(io::Error::other)?));
        }
        if let Some((_, bytes)) = &*current {
            into.copy_from_slice(&bytes[start..start + into.len()]);
        }
        Ok(())
    }
}
