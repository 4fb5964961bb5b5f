//! The manifest: all tensors of a checkpoint, and where every chunk of them is.
//!
//! ```text
//! trainyard-checkpoint 3 <digest of the rest of the file>
//! {"state": {...}, "tensors": {...}, "files": {...}}
//! ```
//!
//! The manifest is written last and atomically, so its existence means that the checkpoint is complete.

use std::collections::BTreeMap;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use trainyard_mesh::Slice;

use crate::digest::{BLOCK_BYTES, Digest};
use crate::{CheckpointError, Result, TrainState};

/// The file name of the manifest.
pub const MANIFEST: &str = "manifest.json";
/// The version of the checkpoint format, the only one that this build reads and writes.
pub const FORMAT_VERSION: u64 = 3;
/// The largest file a manifest may name, so that sums of offsets do not overflow.
const MAX_FILE: u64 = 1 << 60;
const MAGIC: &str = "trainyard-checkpoint";

/// The metadata of a checkpoint: everything except the elements of its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The job's progress and config; `None` for weights without a job.
    pub state: Option<TrainState>,
    /// The tensors by global name.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// The files by name in the checkpoint's directory.
    pub files: BTreeMap<String, FileEntry>,
}

/// A tensor and the location of its chunks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The element type.
    pub dtype: Dtype,
    /// The global shape.
    pub shape: Vec<usize>,
    /// The chunks, which cover every element exactly once.
    pub chunks: Vec<Chunk>,
}

/// A slice of a tensor, stored contiguously in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// The name of the file.
    pub file: String,
    /// The offset of the chunk in the file, in bytes.
    pub byte_offset: u64,
    /// The elements of the tensor that the chunk holds.
    pub slice: Slice,
}

/// A file of tensor elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// The length of the file in bytes.
    pub num_bytes: u64,
    /// The digest of every block; `None` for files that another program wrote.
    pub block_digests: Option<Vec<Digest>>,
}

impl Manifest {
    /// Serializes the manifest as its file holds it.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let body = serde_json::to_vec(self).map_err(|e| CheckpointError::format(MANIFEST, e))?;
        let mut text = format!("{MAGIC} {FORMAT_VERSION} {}\n", Digest::of(&body)).into_bytes();
        text.extend(body);
        Ok(text)
    }

    /// Parses and validates the file that [`Manifest::encode`] produced. Errors name `path`.
    pub fn decode(path: &str, text: &[u8]) -> Result<Manifest> {
        let corrupted = |reason: &str| CheckpointError::Corrupted {
            path: path.to_owned(),
            reason: reason.to_owned(),
        };
        let end = text.iter().position(|&byte| byte == b'\n');
        let (head, body) = text.split_at(end.ok_or_else(|| corrupted("it has no header line"))?);
        let body = &body[1..];
        let head = str::from_utf8(head).map_err(|_| corrupted("its header line is not text"))?;
        let [magic, version, digest] = head.split(' ').collect::<Vec<_>>()[..] else {
            return Err(corrupted("its header line is not that of a manifest"));
        };
        let version = version.parse();
        let version: u64 = version.map_err(|_| corrupted("its format version is not a number"))?;
        if magic != MAGIC {
            return Err(corrupted("its header line is not that of a manifest"));
        }
        if version != FORMAT_VERSION {
            return Err(CheckpointError::Version {
                path: path.to_owned(),
                found: version,
                supported: FORMAT_VERSION,
            });
        }
        if digest.parse() != Ok(Digest::of(body)) {
            return Err(corrupted("its digest does not match its content"));
        }
        let manifest: Manifest =
            serde_json::from_slice(body).map_err(|e| CheckpointError::format(path, e))?;
        manifest.check(path)?;
        Ok(manifest)
    }

    /// Rejects an inconsistent manifest before anything is allocated for its tensors.
    pub(crate) fn check(&self, path: &str) -> Result<()> {
        for (name, file) in &self.files {
            let invalid =
                |reason: &str| CheckpointError::format(path, format!("{name:?}: {reason}"));
            if !is_plain(name) {
                return Err(invalid(
                    "is not the name of a file in the checkpoint's directory",
                ));
            }
            if file.num_bytes > MAX_FILE {
                return Err(invalid("its length is not plausible"));
            }
            let digests = file.block_digests.as_ref();
            let num_digests = digests.map(|digests| digests.len() as u64);
            if num_digests.is_some_and(|num| num != file.num_bytes.div_ceil(BLOCK_BYTES)) {
                return Err(invalid("its number of digests is not its number of blocks"));
            }
        }
        for (name, tensor) in &self.tensors {
            tensor
                .check(&self.files)
                .map_err(|reason| CheckpointError::tensor(path, name, reason))?;
        }
        Ok(())
    }
}

impl TensorEntry {
    /// The size of all elements in bytes; `None` if it overflows or is not a whole number of bytes.
    pub fn num_bytes(&self) -> Option<u64> {
        bytes_of(&self.shape, self.dtype)
    }

    fn check(&self, files: &BTreeMap<String, FileEntry>) -> Result<(), String> {
        let all = self.num_bytes().ok_or("the size of its shape overflows")?;
        let mut found = 0u64;
        for chunk in &self.chunks {
            let bytes = self
                .chunk_bytes(&chunk.slice)
                .ok_or("it has a chunk outside of the tensor")?;
            let file = files
                .get(&chunk.file)
                .ok_or("it has a chunk in a file that the manifest does not list")?;
            let end = chunk.byte_offset.checked_add(bytes);
            if end.is_none_or(|end| end > file.num_bytes) {
                return Err(format!("it has a chunk outside of {}", chunk.file));
            }
            found = found.saturating_add(bytes);
        }
        if found == all {
            Ok(())
        } else {
            Err(format!("its chunks have {found} bytes of {all}"))
        }
    }

    /// The size of a chunk in bytes; `None` if its slice is not within the tensor.
    fn chunk_bytes(&self, slice: &Slice) -> Option<u64> {
        let (offsets, lengths) = (&slice.region.offsets, &slice.region.lengths);
        if offsets.len() != self.shape.len() || lengths.len() != self.shape.len() {
            return None;
        }
        for ((&offset, &length), &all) in offsets.iter().zip(lengths).zip(&self.shape) {
            offset.checked_add(length).filter(|&end| end <= all)?;
        }
        let region = bytes_of(lengths, self.dtype)?;
        match &slice.flat {
            None => Some(region),
            Some(flat) => {
                let is_within = flat.start <= flat.end && flat.end <= slice.region.num_elements();
                is_within.then(|| bytes_of(&[flat.len()], self.dtype))?
            }
        }
    }
}

/// The size of a tensor in bytes; `None` if it overflows or is not a whole number of bytes.
pub(crate) fn bytes_of(shape: &[usize], dtype: Dtype) -> Option<u64> {
    let mut shape = shape.iter();
    let elements = shape.try_fold(1u64, |product, &n| product.checked_mul(n as u64))?;
    let bits = elements.checked_mul(dtype.bitsize() as u64)?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// Whether `name` is a plain file name: no separators, no parent directory, no hidden file.
pub(crate) fn is_plain(name: &str) -> bool {
    let is_ordinary = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !name.is_empty() && !name.starts_with('.') && name.len() < 256 && name.chars().all(is_ordinary)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use trainyard_mesh::Region;

    use super::*;

    fn small_manifest() -> Manifest {
        let rows = |start: usize| Slice {
            region: Region {
                offsets: vec![start, 0],
                lengths: vec![2, 3],
            },
            flat: None,
        };
        let chunk = |start: usize| Chunk {
            file: "a.safetensors".to_owned(),
            byte_offset: 100 + 12 * start as u64,
            slice: rows(start),
        };
        let tensor = TensorEntry {
            dtype: Dtype::F32,
            shape: vec![4, 3],
            chunks: vec![chunk(0), chunk(2)],
        };
        let file = FileEntry {
            num_bytes: 148,
            block_digests: Some(vec![Digest::of(b"")]),
        };
        Manifest {
            state: None,
            tensors: BTreeMap::from([("model/w".to_owned(), tensor)]),
            files: BTreeMap::from([("a.safetensors".to_owned(), file)]),
        }
    }

    fn rejection(change: impl FnOnce(&mut Manifest)) -> String {
        let mut manifest = small_manifest();
        change(&mut manifest);
        match Manifest::decode("here", &manifest.encode().unwrap()) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    fn chunk(manifest: &mut Manifest) -> &mut Chunk {
        &mut manifest.tensors.get_mut("model/w").unwrap().chunks[0]
    }

    #[test]
    fn a_manifest_round_trips() {
        assert_eq!(rejection(|_| ()), "");
        let text = small_manifest().encode().unwrap();
        assert_eq!(Manifest::decode("here", &text).unwrap(), small_manifest());
    }

    #[test]
    fn inconsistent_manifests_are_rejected() {
        assert!(rejection(|m| chunk(m).byte_offset = 140).contains("outside of a.safetensors"));
        assert!(rejection(|m| chunk(m).byte_offset = u64::MAX).contains("outside"));
        assert!(
            rejection(|m| chunk(m).slice.region.offsets[0] = 3).contains("outside of the tensor")
        );
        assert!(rejection(|m| chunk(m).slice.flat = Some(0..7)).contains("outside of the tensor"));
        assert!(rejection(|m| chunk(m).file = "b".to_owned()).contains("does not list"));
        let drop_chunk =
            |m: &mut Manifest| drop(m.tensors.get_mut("model/w").unwrap().chunks.pop());
        assert!(rejection(drop_chunk).contains("24 bytes of 48"));
        let enlarge =
            |m: &mut Manifest| m.tensors.get_mut("model/w").unwrap().shape = vec![usize::MAX; 2];
        assert!(rejection(enlarge).contains("overflows"));
        let escape = |m: &mut Manifest| {
            let file = m.files["a.safetensors"].clone();
            m.files.insert("../a".to_owned(), file);
        };
        assert!(rejection(escape).contains("not the name of a file"));
    }

    proptest! {
        #[test]
        fn every_flipped_bit_is_detected(at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let mut text = small_manifest().encode().unwrap();
            let at = at.index(text.len());
            text[at] ^= 1 << bit;
            let error = Manifest::decode("here", &text).unwrap_err().to_string();
            prop_assert!(error.contains("here"));
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(text in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Manifest::decode("here", &text);
        }
    }
}
