//! The safetensors file that one rank writes.

use std::collections::HashMap;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use trainyard_mesh::Slice;

use crate::digest::BlockHasher;
use crate::manifest::{Chunk, FileEntry, bytes_of};
use crate::{CheckpointError, Result, Store};

/// The size of the copy buffer: elements are copied and written this many bytes at a time.
const BUFFER: usize = 4 << 20;

/// A slice of a tensor that a rank writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WriteItem {
    /// The tensor's global name.
    pub name: String,
    /// The tensor's element type.
    pub dtype: Dtype,
    /// The tensor's global shape.
    pub shape: Vec<usize>,
    /// The elements to write.
    pub slice: Slice,
}

impl WriteItem {
    /// The size in bytes; `None` if it overflows or is not a whole number of bytes.
    pub fn num_bytes(&self) -> Option<u64> {
        bytes_of(&self.slice.shape(), self.dtype)
    }
}

/// Provides the bytes of the items that [`write_shard`] writes.
pub trait ElementSource {
    /// Copies the bytes of item `index`, beginning at byte `start`, into all of `into`.
    fn copy(&self, index: usize, start: usize, into: &mut [u8]) -> std::io::Result<()>;
}

/// A file that a rank wrote, as [`commit`](crate::commit) adds it to the manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shard {
    /// The name of the file in the checkpoint's directory.
    pub file: String,
    /// The file's length and digests.
    pub entry: FileEntry,
    /// The items in the file, each with its byte offset.
    pub items: Vec<(WriteItem, u64)>,
}

impl Shard {
    /// The manifest chunk of every item.
    pub(crate) fn chunks(self) -> impl Iterator<Item = (WriteItem, Chunk)> {
        let file = self.file;
        self.items.into_iter().map(move |(item, byte_offset)| {
            let chunk = Chunk {
                file: file.clone(),
                byte_offset,
                slice: item.slice.clone(),
            };
            (item, chunk)
        })
    }
}

/// Writes items into `dir/file` in order, and returns when the file is durable.
pub fn write_shard(
    store: &dyn Store,
    dir: &str,
    file: &str,
    items: &[WriteItem],
    elements: &dyn ElementSource,
) -> Result<Shard> {
    let path = format!("{dir}/{file}");
    let described = store.describe(&path);
    let (header, sizes) = header(&described, items)?;
    let mut writer = store.create(&path)?;
    let mut hasher = BlockHasher::default();
    hasher.update(&header);
    writer.write(&header)?;
    let mut buffer = vec![0; BUFFER];
    let mut offsets = Vec::with_capacity(items.len());
    let mut end = header.len() as u64;
    for (index, &size) in sizes.iter().enumerate() {
        offsets.push(end);
        end += size as u64;
        for start in (0..size).step_by(BUFFER) {
            let bytes = &mut buffer[..BUFFER.min(size - start)];
            let copied = elements.copy(index, start, bytes);
            copied.map_err(CheckpointError::io(&described))?;
            hasher.update(bytes);
            writer.write(bytes)?;
        }
    }
    writer.finish()?;
    let (num_bytes, digests) = hasher.finish();
    Ok(Shard {
        file: file.to_owned(),
        entry: FileEntry {
            num_bytes,
            block_digests: Some(digests),
        },
        items: items.iter().cloned().zip(offsets).collect(),
    })
}

/// The safetensors header of a file with these items, and the size of each item in bytes.
fn header(path: &str, items: &[WriteItem]) -> Result<(Vec<u8>, Vec<usize>)> {
    let mut infos = HashMap::with_capacity(items.len());
    let mut sizes = Vec::with_capacity(items.len());
    let mut end = 0;
    for item in items {
        let overflow = || CheckpointError::tensor(path, &item.name, "its size overflows");
        let size = item.num_bytes().and_then(|n| usize::try_from(n).ok());
        let size = size.ok_or_else(overflow)?;
        let info = TensorInfo {
            dtype: item.dtype,
            shape: item.slice.shape(),
            data_offsets: (end, end + size),
        };
        end += size;
        sizes.push(size);
        if infos.insert(item.name.clone(), info).is_some() {
            return Err(CheckpointError::tensor(
                path,
                &item.name,
                "it is in one file twice",
            ));
        }
    }
    let names = items.iter().map(|item| item.name.clone());
    let ordered = names.filter_map(|name| infos.remove_entry(&name)).collect();
    let metadata = Metadata::new(None, ordered).map_err(|e| CheckpointError::format(path, e))?;
    let mut text = serde_json::to_vec(&metadata).map_err(|e| CheckpointError::format(path, e))?;
    // Align the elements to 8 bytes, the largest element size.
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    Ok((header, sizes))
}
