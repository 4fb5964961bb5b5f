//! Weights as Hugging Face has them: safetensors files of whole tensors, and an index where there are
//! several.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};

use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use trainyard_mesh::Slice;

use crate::foreign::manifest_of;
use crate::load::{Checkpoint, Want};
use crate::manifest::{Manifest, TensorEntry};
use crate::neighbours::neighbours;
use crate::shard::{Elements, Part, write_shard};
use crate::{CheckpointError, MODEL, Result, Store, experts, model_name};

const ONE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Tables that old files have and that follow from the config.
const DERIVED: [&str; 3] = ["rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"];
/// GPT-2's maps to queries, keys and values at once, whose names end so. A dimension of three tells
/// them apart, so that ranks can have some heads of each; the elements and their order are the same.
const FUSED: [&str; 2] = [".attn.c_attn.weight", ".attn.c_attn.bias"];
/// What GPT-2's names begin with where the model was saved without its head.
const HEADLESS: [&str; 4] = ["wte.", "wpe.", "h.", "ln_f."];
/// No honest index is larger.
const MAX_INDEX: u64 = 100_000_000;

/// No honest model lies in more files.
const MAX_FILES: usize = 100_000;

/// Which file has which tensor, as it is written.
#[derive(Serialize)]
struct Index {
    metadata: serde_json::Value,
    weight_map: BTreeMap<String, String>,
}

/// The same as it is read: the files alone, for each says itself what it has. So an index takes no more
/// memory than the names of its files.
#[derive(Deserialize)]
struct Files {
    #[serde(rename = "weight_map", deserialize_with = "values")]
    files: BTreeSet<String>,
}

/// The values of a map, each once.
fn values<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeSet<String>, D::Error> {
    struct Values;

    impl<'de> Visitor<'de> for Values {
        type Value = BTreeSet<String>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a file for every tensor")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut values = BTreeSet::new();
            while let Some((IgnoredAny, value)) = map.next_entry::<IgnoredAny, String>()? {
                values.insert(value);
                if values.len() > MAX_FILES {
                    return Err(A::Error::custom(format!("more than {MAX_FILES} files")));
                }
            }
            Ok(values)
        }
    }

    deserializer.deserialize_map(Values)
}

/// What would be the manifest of a folder of Hugging Face's; none if it is none.
pub(crate) fn manifest(store: &dyn Store, folder: &str) -> Result<Option<Manifest>> {
    let Some(files) = files(store, folder)? else {
        return Ok(None);
    };
    let mut manifest = manifest_of(store, folder, &files, |_, name| {
        model_name(&experts::in_models(&full_name(name)))
    })?;
    let is_derived = |name: &str| DERIVED.iter().any(|end| name.ends_with(end));
    manifest.tensors.retain(|name, _| !is_derived(name));
    for (name, tensor) in &mut manifest.tensors {
        unfuse(name, tensor);
    }
    experts::join(&mut manifest, &store.describe(folder))?;
    Ok(Some(manifest))
}

/// The name a tensor has in the whole model.
fn full_name(name: &str) -> String {
    match HEADLESS.iter().any(|start| name.starts_with(start)) {
        true => format!("transformer.{name}"),
        false => name.to_owned(),
    }
}

fn is_fused(name: &str) -> bool {
    FUSED.iter().any(|end| name.ends_with(end))
}

/// Tells queries, keys and values of one map apart.
fn unfuse(name: &str, tensor: &mut TensorEntry) {
    let Some(last) = tensor.shape.last().copied() else {
        return;
    };
    if !is_fused(name) || !last.is_multiple_of(3) {
        return;
    }
    tensor.shape.pop();
    tensor.shape.extend([3, last / 3]);
    // Whoever has no manifest has whole tensors.
    for piece in &mut tensor.pieces {
        piece.slice = Slice::whole(&tensor.shape);
    }
}

/// The shape that Hugging Face has for a tensor.
fn fused(name: &str, shape: &[usize]) -> Vec<usize> {
    match shape {
        [before @ .., 3, each] if is_fused(name) => [before, &[3 * each]].concat(),
        _ => shape.to_vec(),
    }
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
    let index: Files =
        serde_json::from_slice(&text).map_err(|e| CheckpointError::format(&described, e))?;
    Ok(Some(index.files.into_iter().collect()))
}

/// Writes the parameters of a checkpoint as Hugging Face has them: whole, in files of up to
/// `max_bytes`, with a `config.json` beside them.
pub fn export(
    checkpoint: &Checkpoint,
    to: &Arc<dyn Store>,
    config_json: &str,
    max_bytes: u64,
) -> Result<()> {
    let is_mixtral = is_mixtral(config_json)?;
    let tensors = checkpoint.manifest().tensors.iter();
    let tensors: Vec<Written> = tensors
        .filter_map(|(name, tensor)| Some((name.strip_prefix(MODEL)?, tensor)))
        .flat_map(|(name, tensor)| written(name, tensor, is_mixtral))
        .collect();
    let size = |tensor: &Written| tensor.part.num_bytes().unwrap_or(0);
    let groups = neighbours(&tensors, max_bytes, size);
    remove_old(&**to)?;
    let mut weight_map = BTreeMap::new();
    let mut total = 0;
    for (number, group) in groups.iter().enumerate() {
        let file = match groups.len() {
            1 => ONE_FILE.to_owned(),
            all => format!("model-{:05}-of-{all:05}.safetensors", number + 1),
        };
        let parts: Vec<Part> = group.iter().map(|tensor| tensor.part.clone()).collect();
        total += parts.iter().filter_map(Part::num_bytes).sum::<u64>();
        let elements = FromCheckpoint::new(checkpoint, group);
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

/// Whether the family is the one with names of its own for experts.
fn is_mixtral(config_json: &str) -> Result<bool> {
    let config: serde_json::Value =
        serde_json::from_str(config_json).map_err(|e| CheckpointError::format("config.json", e))?;
    Ok(config["model_type"] == "mixtral")
}

/// A tensor as it is written, and where its elements are.
struct Written {
    part: Part,
    from: Want,
}

/// What is written of a tensor: all of it at once, or a matrix of an expert at a time.
fn written(name: &str, tensor: &TensorEntry, is_mixtral: bool) -> Vec<Written> {
    let parts = experts::parted(name, &tensor.shape, is_mixtral).into_iter();
    let written = parts.map(|(in_file, shape, slice)| {
        let shape = fused(name, &shape);
        Written {
            part: Part {
                name: in_file,
                dtype: tensor.dtype,
                slice: Slice::whole(&shape),
                shape,
            },
            from: Want {
                name: model_name(name),
                slice,
            },
        }
    });
    written.collect()
}

/// Whole tensors of a checkpoint, one at a time in memory.
struct FromCheckpoint<'a> {
    checkpoint: &'a Checkpoint,
    tensors: &'a [Written],
    /// The one that was asked for last.
    current: Mutex<Option<(usize, Vec<u8>)>>,
}

impl<'a> FromCheckpoint<'a> {
    fn new(checkpoint: &'a Checkpoint, tensors: &'a [Written]) -> FromCheckpoint<'a> {
        FromCheckpoint {
            checkpoint,
            tensors,
            current: Mutex::new(None),
        }
    }
}

impl Elements for FromCheckpoint<'_> {
    fn copy(&self, index: usize, start: usize, into: &mut [u8]) -> io::Result<()> {
        let mut current = self.current.lock().unwrap_or_else(|e| e.into_inner());
        if current.as_ref().is_none_or(|(held, _)| *held != index) {
            let whole = self.checkpoint.part(&self.tensors[index].from);
            *current = Some((index, whole.map_err(io::Error::other)?));
        }
        if let Some((_, bytes)) = &*current {
            into.copy_from_slice(&bytes[start..start + into.len()]);
        }
        Ok(())
    }
}
