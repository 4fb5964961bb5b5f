//! Hugging Face weights: safetensors files of unsharded tensors, with an index if there are several files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};

use safetensors::Dtype;
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use trainyard_arch::{DecoderConfig, FusedProjection};
use trainyard_mesh::Slice;

use crate::cast::{cast, is_float};
use crate::fused_projections::{fused_with, split_projections};
use crate::group_by_bytes::group_by_bytes;
use crate::load::{Checkpoint, ReadRequest};
use crate::manifest::{Manifest, TensorEntry};
use crate::safetensors_dir::manifest_of;
use crate::shard::{ElementSource, WriteItem, write_shard};
use crate::{CheckpointError, MODEL, Result, Store, experts, model_name};

const ONE_FILE: &str = "model.safetensors";
const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
/// Suffixes of buffers in old files that the model computes from its config.
const DERIVED: [&str; 3] = ["rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"];
/// Suffixes of GPT-2's fused QKV projections. Our tensors have an extra dimension of three for query, key
/// and value, so that tensor parallelism can shard the heads of each; elements and order are the same.
const FUSED: [&str; 2] = [".attn.c_attn.weight", ".attn.c_attn.bias"];
/// The suffix of the fused QKV projection of other families. Its rows are those of queries, keys and values.
const QKV: &str = ".self_attn.qkv_proj.weight";
/// A tensor that only layers of multi-token prediction have.
const PREDICTOR: &str = ".eh_proj.weight";
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
    drop_predictors(&mut manifest.tensors);
    for (name, tensor) in &mut manifest.tensors {
        unfuse(name, tensor);
    }
    let path = store.describe(dir);
    if manifest.tensors.keys().any(|name| name.ends_with(QKV)) {
        let projections = decoder(store, dir)?.fused_projections();
        split_projections(&mut manifest, &projections, &path)?;
    }
    experts::stack_experts(&mut manifest, &path)?;
    Ok(Some(manifest))
}

/// Drops the layers that predict further tokens (multi-token prediction), which DeepSeek-V3's files have after the layers of
/// the model. They train it, and the model without them is complete.
fn drop_predictors(tensors: &mut BTreeMap<String, TensorEntry>) {
    let layers = tensors.keys().filter_map(|name| {
        let layer = name.strip_suffix(PREDICTOR)?;
        Some(format!("{layer}."))
    });
    let layers: Vec<String> = layers.collect();
    tensors.retain(|name, _| !layers.iter().any(|layer| name.starts_with(layer)));
}

/// The model that the directory's `config.json` describes.
fn decoder(store: &dyn Store, dir: &str) -> Result<DecoderConfig> {
    let path = format!("{dir}/{CONFIG}");
    let described = store.describe(&path);
    let size = store.size(&path)?.filter(|size| *size <= MAX_INDEX);
    let reason = "it is missing, but projections to queries, keys and values are one matrix here";
    let size = size.ok_or_else(|| CheckpointError::format(&described, reason))?;
    let text = store.read(&path, 0..size)?;
    DecoderConfig::from_hugging_face(&String::from_utf8_lossy(&text))
        .map_err(|e| CheckpointError::format(&described, e))
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
fn fused_shape(name: &str, shape: &[usize]) -> Vec<usize> {
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

/// How weights are exported.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// The largest size of a file; a single tensor may be larger.
    pub max_bytes: u64,
    /// The type of all floating-point weights; that of the checkpoint if absent.
    pub dtype: Option<Dtype>,
}

/// Whether a directory has Hugging Face weights, or a part of them.
pub fn has_export(store: &dyn Store) -> Result<bool> {
    let is_exported = |name: &String| is_weights(name) || [INDEX, CONFIG].contains(&name.as_str());
    Ok(store.list(".")?.iter().any(is_exported))
}

/// Exports the parameters of a checkpoint as Hugging Face weights: unsharded tensors in files, and a `config.json`. Replaces
/// those of an earlier export.
pub fn export(
    checkpoint: &Checkpoint,
    to: &Arc<dyn Store>,
    config_json: &str,
    options: ExportOptions,
) -> Result<()> {
    let layout = FileLayout::of(config_json)?;
    let tensors = &checkpoint.manifest().tensors;
    let tensors: Vec<ExportedTensor> = tensors
        .keys()
        .filter_map(|name| name.strip_prefix(MODEL))
        .flat_map(|name| layout.exported(name, tensors))
        .map(|tensor| tensor.cast_to(options.dtype))
        .collect();
    let size = |tensor: &ExportedTensor| tensor.item.num_bytes().unwrap_or(0);
    let groups = group_by_bytes(&tensors, options.max_bytes, size);
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
    to.put(CONFIG, config_json.as_bytes())
}

/// Deletes the weights of an earlier export, the index first, so that no reader loads a mixture of both.
fn remove_old(store: &dyn Store) -> Result<()> {
    store.remove(INDEX)?;
    for name in store.list(".")? {
        if is_weights(&name) {
            store.remove(&name)?;
        }
    }
    Ok(())
}

/// Whether a file of this name has weights that an export has written.
fn is_weights(name: &str) -> bool {
    let is_shard = name.starts_with("model-") && name.ends_with(".safetensors");
    is_shard || name == ONE_FILE
}

/// How the files of a family differ from the model.
struct FileLayout {
    /// Mixtral names its experts differently from all others.
    is_mixtral: bool,
    projections: Vec<FusedProjection>,
}

impl FileLayout {
    fn of(config_json: &str) -> Result<FileLayout> {
        let invalid = |error: &dyn fmt::Display| CheckpointError::format(CONFIG, error);
        let keys: serde_json::Value =
            serde_json::from_str(config_json).map_err(|error| invalid(&error))?;
        let decoder = DecoderConfig::from_hugging_face(config_json);
        Ok(FileLayout {
            is_mixtral: keys["model_type"] == "mixtral",
            projections: decoder
                .map_err(|error| invalid(&error))?
                .fused_projections(),
        })
    }

    /// The exported tensors of one tensor of the checkpoint: one, one per expert and matrix, or none if it is in the
    /// tensor of another.
    fn exported(&self, name: &str, tensors: &BTreeMap<String, TensorEntry>) -> Vec<ExportedTensor> {
        let find = |name: &str| tensors.get(&model_name(name));
        if let Some((fused, parts)) = fused_with(name, &self.projections) {
            let is_first = parts.first().is_some_and(|first| first == name);
            let found = parts
                .iter()
                .filter(|_| is_first)
                .filter_map(|part| Some((part.as_str(), find(part)?)));
            return ExportedTensor::joined(fused, &found.collect::<Vec<_>>())
                .into_iter()
                .collect();
        }
        let Some(tensor) = find(name) else {
            return Vec::new();
        };
        let tensors = experts::split_experts(name, &tensor.shape, self.is_mixtral).into_iter();
        let exported = tensors.map(|(in_file, shape, slice)| {
            let from = ReadRequest {
                name: model_name(name),
                slice,
            };
            ExportedTensor::new(in_file, tensor, fused_shape(name, &shape), vec![from])
        });
        exported.collect()
    }
}

/// A tensor of the exported files, and the slices of the checkpoint that it consists of, one after the other.
struct ExportedTensor {
    item: WriteItem,
    from: Vec<ReadRequest>,
    /// The type in the checkpoint.
    dtype: Dtype,
}

impl ExportedTensor {
    fn new(
        name: String,
        like: &TensorEntry,
        shape: Vec<usize>,
        from: Vec<ReadRequest>,
    ) -> ExportedTensor {
        let item = WriteItem {
            name,
            dtype: like.dtype,
            slice: Slice::full(&shape),
            shape,
        };
        ExportedTensor {
            item,
            from,
            dtype: like.dtype,
        }
    }

    /// The tensor in another type, if it has numbers that can be rounded.
    fn cast_to(mut self, dtype: Option<Dtype>) -> ExportedTensor {
        if is_float(self.dtype) {
            self.item.dtype = dtype.unwrap_or(self.dtype);
        }
        self
    }

    /// Matrices, one below the other.
    fn joined(name: String, parts: &[(&str, &TensorEntry)]) -> Option<ExportedTensor> {
        let (_, first) = parts.first()?;
        let rows = parts.iter().filter_map(|(_, part)| part.shape.first());
        let shape = vec![rows.sum(), *first.shape.get(1)?];
        let from = parts.iter().map(|(name, part)| ReadRequest {
            name: model_name(name),
            slice: Slice::full(&part.shape),
        });
        Some(ExportedTensor::new(name, first, shape, from.collect()))
    }
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
            let (tensor, mut bytes) = (&self.tensors[index], Vec::new());
            for part in &tensor.from {
                let part = self.checkpoint.read_slice(part);
                bytes.append(&mut part.map_err(io::Error::other)?);
            }
            let bytes = cast(bytes, tensor.dtype, tensor.item.dtype);
            *current = Some((index, bytes));
        }
        if let Some((_, bytes)) = &*current {
            into.copy_from_slice(&bytes[start..start + into.len()]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_multi_token_prediction_are_dropped() {
        let names = [
            "model.model.layers.6.mlp.weight",
            "model.model.layers.60.mlp.weight",
            "model.model.layers.61.eh_proj.weight",
            "model.model.layers.61.mlp.weight",
        ];
        let entry = || TensorEntry {
            dtype: Dtype::F32,
            shape: Vec::new(),
            chunks: Vec::new(),
        };
        let mut tensors = names.map(|name| (name.to_owned(), entry())).into();
        drop_predictors(&mut tensors);
        assert!(tensors.keys().eq(&names[..2]));
    }
}
