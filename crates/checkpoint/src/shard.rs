//! One rank's file: a safetensors file of the parts this rank writes.

use std::collections::HashMap;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use trainyard_mesh::Slice;

use crate::digest::Blocks;
use crate::manifest::{FileEntry, Piece, bytes_of};
use crate::{CheckpointError, Result, Store};

/// Bytes that are asked for, and written, at a time.
const CHUNK: usize = 4 << 20;

/// A part of a tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// The tensor's global name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its global shape.
    pub shape: Vec<usize>,
    /// Which part of it this is.
    pub slice: Slice,
}

impl Part {
    /// How many bytes it has.
    pub fn num_bytes(&self) -> Option<u64> {
        bytes_of(&self.slice.shape(), self.dtype)
    }
}

/// Where the elements of parts come from.
pub trait Elements {
    /// Copies the bytes of part `index` from `start` on.
    fn copy(&self, index: usize, start: usize, into: &mut [u8]) -> std::io::Result<()>;
}

/// What a rank has written, for the manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shard {
    /// The file's name.
    pub file: String,
    /// The file.
    pub entry: FileEntry,
    /// What is in it, and where.
    pub parts: Vec<(Part, u64)>,
}

impl Shard {
    /// The parts as pieces of tensors.
    pub(crate) fn pieces(self) -> impl Iterator<Item = (Part, Piece)> {
        let file = self.file;
        self.parts.into_iter().map(move |(part, start)| {
            let piece = Piece {
                file: file.clone(),
                start,
                slice: part.slice.clone(),
            };
            (part, piece)
        })
    }
}

/// Writes parts into `folder/file`, in order, and returns when they are there for sure.
pub fn write_shard(
    store: &dyn Store,
    folder: &str,
    file: &str,
    parts: &[Part],
    elements: &dyn Elements,
) -> Result<Shard> {
    let path = format!("{folder}/{file}");
    let described = store.describe(&path);
    let (header, sizes) = header(&described, parts)?;
    let mut sink = store.create(&path)?;
    let mut blocks = Blocks::default();
    blocks.add(&header);
    sink.write(&header)?;
    let mut chunk = vec![0; CHUNK];
    let mut starts = Vec::with_capacity(parts.len());
    let mut end = header.len() as u64;
    for (index, &size) in sizes.iter().enumerate() {
        starts.push(end);
        end += size as u64;
        for start in (0..size).step_by(CHUNK) {
            let chunk = &mut chunk[..CHUNK.min(size - start)];
            let copied = elements.copy(index, start, chunk);
            copied.map_err(CheckpointError::io(&described))?;
            blocks.add(chunk);
            sink.write(chunk)?;
        }
    }
    sink.finish()?;
    let (num_bytes, digests) = blocks.finish();
    Ok(Shard {
        file: file.to_owned(),
        entry: FileEntry {
            num_bytes,
            blocks: Some(digests),
        },
        parts: parts.iter().cloned().zip(starts).collect(),
    })
}

/// What a safetensors file with these parts begins with, and the bytes of each part.
fn header(path: &str, parts: &[Part]) -> Result<(Vec<u8>, Vec<usize>)> {
    let mut infos = HashMap::with_capacity(parts.len());
    let mut sizes = Vec::with_capacity(parts.len());
    let mut end = 0;
    for part in parts {
        let uncountable = || CheckpointError::tensor(path, &part.name, "too large to count");
        let size = part.num_bytes().and_then(|n| usize::try_from(n).ok());
        let size = size.ok_or_else(uncountable)?;
        let info = TensorInfo {
            dtype: part.dtype,
            shape: part.slice.shape(),
            data_offsets: (end, end + size),
        };
        end += size;
        sizes.push(size);
        if infos.insert(part.name.clone(), info).is_some() {
            return Err(CheckpointError::tensor(
                path,
                &part.name,
                "twice in one file",
            ));
        }
    }
    let names = parts.iter().map(|part| part.name.clone());
    let ordered = names.filter_map(|name| infos.remove_entry(&name)).collect();
    let metadata = Metadata::new(None, ordered).map_err(|e| CheckpointError::format(path, e))?;
    let mut text = serde_json::to_vec(&metadata).map_err(|e| CheckpointError::format(path, e))?;
    // Elements begin at a multiple of their size.
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    Ok((header, sizes))
}
