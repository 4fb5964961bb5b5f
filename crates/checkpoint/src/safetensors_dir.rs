//! Directories of safetensors files without a manifest, as Hugging Face distributes weights.

use std::collections::BTreeMap;

use safetensors::tensor::Metadata;
use trainyard_mesh::Slice;

use crate::manifest::{Chunk, FileEntry, Manifest, TensorEntry, is_plain};
use crate::{CheckpointError, Result, Store};

/// The size of the header length at the beginning of every file, in bytes.
const PREFIX: u64 = 8;
/// The largest accepted header, in bytes.
const MAX_HEADER: u64 = 100_000_000;
/// The most commas accepted in a header. A tensor takes about seven, so this allows tens of thousands of
/// tensors in one file.
const MAX_COMMAS: usize = 1 << 18;

/// Builds the manifest of files that hold unsharded tensors. `rename` maps the name of a tensor in a file
/// to its name in the manifest.
pub(crate) fn manifest_of(
    store: &dyn Store,
    dir: &str,
    files: &[String],
    rename: impl Fn(&str) -> String,
) -> Result<Manifest> {
    let mut manifest = Manifest {
        state: None,
        tensors: BTreeMap::new(),
        files: BTreeMap::new(),
    };
    for file in files {
        if !is_plain(file) {
            let reason = format!("{file:?} is not the name of a file in this directory");
            return Err(CheckpointError::format(&store.describe(dir), reason));
        }
        let path = format!("{dir}/{file}");
        let described = store.describe(&path);
        let (metadata, base, num_bytes) = read_header(store, &path)?;
        let entry = FileEntry {
            num_bytes,
            block_digests: None,
        };
        manifest.files.insert(file.clone(), entry);
        for (name, info) in metadata.tensors() {
            let chunk = Chunk {
                file: file.clone(),
                byte_offset: base + info.data_offsets.0 as u64,
                slice: Slice::full(&info.shape),
            };
            let tensor = TensorEntry {
                dtype: info.dtype,
                shape: info.shape.clone(),
                chunks: vec![chunk],
            };
            let name = rename(&name);
            if manifest.tensors.insert(name.clone(), tensor).is_some() {
                let reason = "two files hold this tensor";
                return Err(CheckpointError::tensor(&described, &name, reason));
            }
        }
    }
    manifest.check(&store.describe(dir))?;
    Ok(manifest)
}

/// The header of a file, the offset of its elements, and its length.
fn read_header(store: &dyn Store, path: &str) -> Result<(Metadata, u64, u64)> {
    let described = store.describe(path);
    let invalid = |reason: &str| CheckpointError::format(&described, reason);
    let size = store
        .size(path)?
        .ok_or_else(|| invalid("the file is missing"))?;
    if size < PREFIX {
        return Err(invalid("too short for a safetensors file"));
    }
    let length: [u8; 8] = store
        .read(path, 0..PREFIX)?
        .try_into()
        .map_err(|_| invalid("too short for a safetensors file"))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER || length > size - PREFIX {
        return Err(invalid("its header is longer than the file or than 100 MB"));
    }
    let base = PREFIX + length;
    let text = store.read(path, PREFIX..base)?;
    // Every value in the header needs a comma, so counting them bounds what the parser allocates.
    if text.iter().filter(|&&byte| byte == b',').count() > MAX_COMMAS {
        return Err(invalid("its header has too many entries"));
    }
    let metadata: Metadata =
        serde_json::from_slice(&text).map_err(|e| CheckpointError::format(&described, e))?;
    if metadata.data_len() as u64 == size - base {
        Ok((metadata, base, size))
    } else {
        Err(invalid("its length does not match its header"))
    }
}
