//! Safetensors files that no manifest describes: as Hugging Face has them, and as version 1 wrote them.

use std::collections::BTreeMap;

use safetensors::tensor::Metadata;
use trainyard_mesh::Slice;

use crate::manifest::{FileEntry, Manifest, Piece, TensorEntry, is_plain};
use crate::{CheckpointError, Result, Store};

/// Bytes of the header's own length, which every file begins with.
const PREFIX: u64 = 8;
/// No honest header is larger.
const MAX_HEADER: u64 = 100_000_000;
/// Nor has one more commas: a tensor takes about seven, so these are tens of thousands of tensors in one
/// file.
const MAX_COMMAS: usize = 1 << 18;

/// The manifest of some files of whole tensors; `rename` gives each its name.
pub(crate) fn manifest_of(
    store: &dyn Store,
    folder: &str,
    files: &[String],
    rename: impl Fn(&str, &str) -> String,
) -> Result<Manifest> {
    let mut manifest = Manifest {
        state: None,
        tensors: BTreeMap::new(),
        files: BTreeMap::new(),
    };
    for file in files {
        if !is_plain(file) {
            let reason = format!("{file:?} is no name of a file of this folder");
            return Err(CheckpointError::format(&store.describe(folder), reason));
        }
        let path = format!("{folder}/{file}");
        let described = store.describe(&path);
        let (metadata, base, num_bytes) = read_header(store, &path)?;
        let entry = FileEntry {
            num_bytes,
            blocks: None,
        };
        manifest.files.insert(file.clone(), entry);
        for (name, info) in metadata.tensors() {
            let piece = Piece {
                file: file.clone(),
                start: base + info.data_offsets.0 as u64,
                slice: Slice::whole(&info.shape),
            };
            let tensor = TensorEntry {
                dtype: info.dtype,
                shape: info.shape.clone(),
                pieces: vec![piece],
            };
            let name = rename(file, &name);
            if manifest.tensors.insert(name.clone(), tensor).is_some() {
                return Err(CheckpointError::tensor(&described, &name, "is there twice"));
            }
        }
    }
    manifest.check(&store.describe(folder))?;
    Ok(manifest)
}

/// What a file holds, where its elements begin, and how long it is.
fn read_header(store: &dyn Store, path: &str) -> Result<(Metadata, u64, u64)> {
    let described = store.describe(path);
    let wrong = |reason: &str| CheckpointError::format(&described, reason);
    let size = store
        .size(path)?
        .ok_or_else(|| wrong("there is no such file"))?;
    if size < PREFIX {
        return Err(wrong("too short for a safetensors file"));
    }
    let length: [u8; 8] = store
        .read(path, 0..PREFIX)?
        .try_into()
        .map_err(|_| wrong("too short for a safetensors file"))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER || length > size - PREFIX {
        return Err(wrong("its header is longer than it may be"));
    }
    let base = PREFIX + length;
    let text = store.read(path, PREFIX..base)?;
    // Whatever is held of a header, a comma of it stands for: counted before anything is allocated.
    if text.iter().filter(|&&byte| byte == b',').count() > MAX_COMMAS {
        return Err(wrong("its header has more in it than it may have"));
    }
    let metadata: Metadata =
        serde_json::from_slice(&text).map_err(|e| CheckpointError::format(&described, e))?;
    match metadata.data_len() as u64 == size - base {
        true => Ok((metadata, base, size)),
        false => Err(wrong("it is longer or shorter than its header says")),
    }
}
