//! Hugging Face weights: safetensors files of unsharded tensors, with an index if there are several files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};

use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use trainyard_mesh::Slice;

use crate::group_by_bytes::group_by_bytes;
use crate::load::{Checkpoint, ReadRequest};
use crate::manifest::{Manifest, TensorEntry};
use crate::safetensors_dir::manifest_of;
use crate::shard::{ElementSource, WriteItem, write_shard};
use crate::{CheckpointError, MODEL, Result, Store, experts, model_name};

const ONE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Suffixes of buffers in old files that the model computes from its config.
const DERIVED: [&str; 3] = ["rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"];
/// Suffixes of GPT-2's fused QKV projections. Our tensors have an extra dimension of three for query, key
/// and value, so that tensor parallelism can shard the heads of each; elements and order are the same.
const FUSED: [&str; 2] = [".attn.c_attn.weight", ".attn.c_attn.bias"];
/// Prefixes of GPT-2's names in a model that was saved without its language-model head.
const HEADLESS: [&str; 4] = ["wte.", "wpe.", "h.", "ln_f."];
/// The largest accepted index, in bytes.
const MAX_INDEX: u64 = 100_000_000;

/// The most files accepted in an index.
const MAX_FILES: usize = 100_000;

/// The index file as we write it: the file of every tensor.
#[derive(Serialize)]
struct Index {
    metadata: serde_json::Value,
    weight_map: BTreeMap<String, String>,
}

/// The index file as we read it: only the file names, because the header of every file lists its tensors.
/// This bounds the memory that an index takes by the names of its files.
#[derive(Deserialize)]
struct Files {
    #[serde(rename = "weight_map", deserialize_with = "values")]
    files: BTreeSet<String>,
}

/// The distinct values of a map.
fn values<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeSet<String>, D::Error> {
    struct Values;

    impl<'de> Visitor<'de> for Values {
        type Value = BTreeSet<String>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a map from tensor names to file names")
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

/// Builds the manifest of a directory of Hugging Face weights; `None` if it has no such weights.
pub(crate) fn manifest(store: &dyn Store, dir: &str) -> Result<Option<Manifest>> {
    let Some(files) = files(store, dir)? else {
        return Ok(None);
    };
    let mut manifest = manifest_of(store, dir, &files, |name| {
        model_name(&experts::model_layout_name(&full_name(name)))
    })?;
    let is_derived = |name: &str| DERIVED.iter().any(|end| name.ends_with(end));
    manifest.tensors.retain(|name, _| !is_derived(name));
    for (name, tensor) in &mut manifest.tensors {
        unfuse(name, tensor);
    }
    experts::stack_experts(&mut manifest, &store.describe(dir))?;
    Ok(Some(manifest))
}

/// The name of a tensor in the model with its language-model head.
fn full_name(name: &str) -> String {
    if HEADLESS.iter().any(|start| name.starts_with(start)) {
        format!("transformer.{name}")
    } else {
        name.to_owned()
    }
}

fn is_fused(name: &str) -> bool {
    FUSED.iter().any(|end| name.ends_with(end))
}

/// Adds the query-key-value dimension to a fused projection.
fn unfuse(name: &str, tensor: &mut TensorEntry) {
    let Some(last) = tensor.shape.last().copied() else {
        return;
    };
    if !is_fused(name) || !last.is_multiple_of(3) {
        return;
    }
    tensor.shape.pop();
    tensor.shape.extend([3, last / 3]);
    // Hugging Face files hold unsharded tensors.
    for chunk in &mut tensor.chunks {
        chunk.slice = Slice::full(&tensor.shape);
    }
}

/// The shape of a tensor in a Hugging Face file.
fn fused(name: &str, shape: &[usize]) -> Vec<usize> {
    match shape {
        [before @ .., 3, each] if is_fused(name) => [before, &[3 * each]].concat(),
        _ => shape.to_vec(),
    }
}

fn files(store: &dyn Store, dir: &str) -> Result<Option<Vec<String>>> {
    let path = format!("{dir}/{INDEX}");
    let Some(size) = store.size(&path)? else {
        let one = store.size(&format!("{dir}/{ONE_FILE}"))?;
        return Ok(one.map(|_| vec![ONE_FILE.to_owned()]));
    };
    let described = store.describe(&path);
    if size > MAX_INDEX {
        return Err(CheckpointError::format(
            &described,
            "the index is larger than 100 MB",
        ));
    }
    let text = store.read(&path, 0..size)?;
    let index: Files =
        serde_json::from_slice(&text).map_err(|e| CheckpointError::format(&described, e))?;
    Ok(Some(index.files.into_iter().collect()))
}

/// Exports the parameters of a checkpoint as Hugging Face weights: unsharded tensors in files of at most
/// `max_bytes`, and a `config.json`.
pub fn export(
    checkpoint: &Checkpoint,
    to: &Arc<dyn Store>,
    config_json: &str,
    max_bytes: u64,
) -> Result<()> {
    let is_mixtral = is_mixtral(config_json)?;
    let tensors = checkpoint.manifest().tensors.iter();
    let tensors: Vec<ExportedTensor> = tensors
        .filter_map(|(name, tensor)| Some((name.strip_prefix(MODEL)?, tensor)))
        .flat_map(|(name, tensor)| exported(name, tensor, is_mixtral))
        .collect();
    let size = |tensor: &ExportedTensor| tensor.item.num_bytes().unwrap_or(0);
    let groups = group_by_bytes(&tensors, max_bytes, size);
    remove_old(&**to)?;
    let mut weight_map = BTreeMap::new();
    let mut total = 0;
    for (number, group) in groups.iter().enumerate() {
        let file = match groups.len() {
            1 => ONE_FILE.to_owned(),
            all => format!("model-{:05}-of-{all:05}.safetensors", number + 1),
        };
        let items: Vec<WriteItem> = group.iter().map(|tensor| tensor.item.clone()).collect();
        total += items.iter().filter_map(WriteItem::num_bytes).sum::<u64>();
        let elements = FromCheckpoint::new(checkpoint, group);
        write_shard(&**to, ".", &file, &items, &elements)?;
        weight_map.extend(items.into_iter().map(|item| (item.name, file.clone())));
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

/// Deletes the weights of an earlier export, the index first, so that no reader loads a mixture of both.
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

/// Whether the model family is Mixtral, which names its experts differently from all others.
fn is_mixtral(config_json: &str) -> Result<bool> {
    let config: serde_json::Value =
        serde_json::from_str(config_json).map_err(|e| CheckpointError::format("config.json", e))?;
    Ok(config["model_type"] == "mixtral")
}

/// A tensor of the exported files, and the slice of the checkpoint that it comes from.
struct ExportedTensor {
    item: WriteItem,
    from: ReadRequest,
}

/// The exported tensors of one tensor of the checkpoint: one, or one per expert and matrix.
fn exported(name: &str, tensor: &TensorEntry, is_mixtral: bool) -> Vec<ExportedTensor> {
    let tensors = experts::split_experts(name, &tensor.shape, is_mixtral).into_iter();
    let exported = tensors.map(|(in_file, shape, slice)| {
        let shape = fused(name, &shape);
        ExportedTensor {
            item: WriteItem {
                name: in_file,
                dtype: tensor.dtype,
                slice: Slice::full(&shape),
                shape,
            },
            from: ReadRequest {
                name: model_name(name),
                slice,
            },
        }
    });
    exported.collect()
}

/// Reads exported tensors from a checkpoint and keeps one of them in memory at a time.
struct FromCheckpoint<'a> {
    checkpoint: &'a Checkpoint,
    tensors: &'a [ExportedTensor],
    /// The index and the bytes of the tensor that was read last.
    current: Mutex<Option<(usize, Vec<u8>)>>,
}

impl<'a> FromCheckpoint<'a> {
    fn new(checkpoint: &'a Checkpoint, tensors: &'a [ExportedTensor]) -> FromCheckpoint<'a> {
        FromCheckpoint {
            checkpoint,
            tensors,
            current: Mutex::new(None),
        }
    }
}

impl ElementSource for FromCheckpoint<'_> {
    fn copy(&self, index: usize, start: usize, into: &mut [u8]) -> io::Result<()> {
        let mut current = self.current.lock().unwrap_or_else(|e| e.into_inner());
        if current.as_ref().is_none_or(|(loaded, _)| *loaded != index) {
            let bytes = self.checkpoint.read_slice(&self.tensors[index].from);
            *current = Some((index, bytes.map_err(io::Error::other)?));
        }
        if let Some((_, bytes)) = &*current {
            into.copy_from_slice(&bytes[start..start + into.len()]);
        }
        Ok(())
    }
}
