//! The manifest: which tensors there are, and where every part of them lies.
//!
//! ```text
//! trainyard-checkpoint 2 <digest of what follows>
//! {"state": {...}, "tensors": {...}, "files": {...}}
//! ```
//!
//! Whoever has a manifest has a checkpoint: it is written last and appears in one step.

use std::collections::BTreeMap;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use trainyard_mesh::Slice;

use crate::digest::{BLOCK, Digest};
use crate::{CheckpointError, Result, TrainState};

/// Its name in the folder of a checkpoint.
pub const MANIFEST: &str = "manifest.json";
/// The version this program writes.
pub const VERSION: u64 = 2;
/// No file is longer, so sums of places in one do not overflow.
const MAX_FILE: u64 = 1 << 60;
const MAGIC: &str = "trainyard-checkpoint";

/// All of a checkpoint but the elements of its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Where the job stood; none for weights alone.
    pub state: Option<TrainState>,
    /// By global name.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// By name in the folder.
    pub files: BTreeMap<String, FileEntry>,
}

/// A tensor, and where its parts lie.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its global shape.
    pub shape: Vec<usize>,
    /// Its parts; together they are all of it, once.
    pub pieces: Vec<Piece>,
}

/// A part of a tensor, in one stretch of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// The file.
    pub file: String,
    /// Where it begins, in bytes.
    pub start: u64,
    /// Which part of the tensor it is.
    pub slice: Slice,
}

/// A file of elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// How long it is.
    pub num_bytes: u64,
    /// The digest of every block; none where nobody took them.
    pub blocks: Option<Vec<Digest>>,
}

impl Manifest {
    /// As it lies in its file.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let body = serde_json::to_vec(self).map_err(|e| CheckpointError::format(MANIFEST, e))?;
        let mut text = format!("{MAGIC} {VERSION} {}\n", Digest::of(&body)).into_bytes();
        text.extend(body);
        Ok(text)
    }

    /// Reads what [`Manifest::encode`] wrote; `path` is what errors name.
    pub fn decode(path: &str, text: &[u8]) -> Result<Manifest> {
        let damaged = |what: &str| CheckpointError::Damaged {
            path: path.to_owned(),
            what: what.to_owned(),
        };
        let end = text.iter().position(|&byte| byte == b'\n');
        let (head, body) = text.split_at(end.ok_or_else(|| damaged("it has no first line"))?);
        let body = &body[1..];
        let head = str::from_utf8(head).map_err(|_| damaged("its first line is no text"))?;
        let [magic, version, digest] = head.split(' ').collect::<Vec<_>>()[..] else {
            return Err(damaged("its first line is not a manifest's"));
        };
        let version: u64 = version.parse().map_err(|_| damaged("it has no version"))?;
        if magic != MAGIC {
            return Err(damaged("its first line is not a manifest's"));
        }
        if version != VERSION {
            return Err(CheckpointError::Version {
                path: path.to_owned(),
                found: version,
                known: VERSION,
            });
        }
        if digest.parse() != Ok(Digest::of(body)) {
            return Err(damaged("its digest is another"));
        }
        let manifest: Manifest =
            serde_json::from_slice(body).map_err(|e| CheckpointError::format(path, e))?;
        manifest.check(path)?;
        Ok(manifest)
    }

    /// Refuses what cannot be read, before anything is allocated for it.
    pub(crate) fn check(&self, path: &str) -> Result<()> {
        for (name, file) in &self.files {
            let wrong = |reason: &str| CheckpointError::format(path, format!("{name:?}: {reason}"));
            if !is_plain(name) {
                return Err(wrong("files of a checkpoint lie in its folder"));
            }
            if file.num_bytes > MAX_FILE {
                return Err(wrong("no file is so long"));
            }
            let blocks = file.blocks.as_ref().map(|blocks| blocks.len() as u64);
            if blocks.is_some_and(|num| num != file.num_bytes.div_ceil(BLOCK)) {
                return Err(wrong("its digests are not those of its blocks"));
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
    /// Bytes of its elements; none where nobody can count them.
    pub fn num_bytes(&self) -> Option<u64> {
        bytes_of(&self.shape, self.dtype)
    }

    fn check(&self, files: &BTreeMap<String, FileEntry>) -> Result<(), String> {
        let all = self.num_bytes().ok_or("a shape that nobody can count")?;
        let mut found = 0u64;
        for piece in &self.pieces {
            let bytes = self
                .bytes_of_piece(&piece.slice)
                .ok_or("a part outside of the tensor")?;
            let file = files
                .get(&piece.file)
                .ok_or("a part in a file that is not there")?;
            let end = piece.start.checked_add(bytes);
            if end.is_none_or(|end| end > file.num_bytes) {
                return Err(format!("a part outside of {}", piece.file));
            }
            found = found.saturating_add(bytes);
        }
        match found == all {
            true => Ok(()),
            false => Err(format!("its parts hold {found} bytes of {all}")),
        }
    }

    /// Bytes of a part, if it is one.
    fn bytes_of_piece(&self, slice: &Slice) -> Option<u64> {
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

/// Bytes of so many elements; none where they are too many, or do not fill bytes.
pub(crate) fn bytes_of(shape: &[usize], dtype: Dtype) -> Option<u64> {
    let mut shape = shape.iter();
    let elements = shape.try_fold(1u64, |product, &n| product.checked_mul(n as u64))?;
    let bits = elements.checked_mul(dtype.bitsize() as u64)?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// Whether a name is that of a file in the same folder and nothing else.
fn is_plain(name: &str) -> bool {
    let is_ordinary = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !name.is_empty() && !name.starts_with('.') && name.len() < 256 && name.chars().all(is_ordinary)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use trainyard_mesh::Region;

    use super::*;

    fn little() -> Manifest {
        let rows = |start: usize| Slice {
            region: Region {
                offsets: vec![start, 0],
                lengths: vec![2, 3],
            },
            flat: None,
        };
        let piece = |start: usize| Piece {
            file: "a.safetensors".to_owned(),
            start: 100 + 12 * start as u64,
            slice: rows(start),
        };
        let tensor = TensorEntry {
            dtype: Dtype::F32,
            shape: vec![4, 3],
            pieces: vec![piece(0), piece(2)],
        };
        let file = FileEntry {
            num_bytes: 148,
            blocks: Some(vec![Digest::of(b"")]),
        };
        Manifest {
            state: None,
            tensors: BTreeMap::from([("model/w".to_owned(), tensor)]),
            files: BTreeMap::from([("a.safetensors".to_owned(), file)]),
        }
    }

    fn refusal(change: impl FnOnce(&mut Manifest)) -> String {
        let mut manifest = little();
        change(&mut manifest);
        match Manifest::decode("here", &manifest.encode().unwrap()) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    fn piece(manifest: &mut Manifest) -> &mut Piece {
        &mut manifest.tensors.get_mut("model/w").unwrap().pieces[0]
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(refusal(|_| ()), "");
        let text = little().encode().unwrap();
        assert_eq!(Manifest::decode("here", &text).unwrap(), little());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(refusal(|m| piece(m).start = 140).contains("outside of a.safetensors"));
        assert!(refusal(|m| piece(m).start = u64::MAX).contains("outside"));
        assert!(
            refusal(|m| piece(m).slice.region.offsets[0] = 3).contains("outside of the tensor")
        );
        assert!(refusal(|m| piece(m).slice.flat = Some(0..7)).contains("outside of the tensor"));
        assert!(refusal(|m| piece(m).file = "b".to_owned()).contains("not there"));
        let drop_piece =
            |m: &mut Manifest| drop(m.tensors.get_mut("model/w").unwrap().pieces.pop());
        assert!(refusal(drop_piece).contains("24 bytes of 48"));
        let enlarge =
            |m: &mut Manifest| m.tensors.get_mut("model/w").unwrap().shape = vec![usize::MAX; 2];
        assert!(refusal(enlarge).contains("nobody can count"));
        let escape = |m: &mut Manifest| {
            let file = m.files["a.safetensors"].clone();
            m.files.insert("../a".to_owned(), file);
        };
        assert!(refusal(escape).contains("lie in its folder"));
    }

    proptest! {
        #[test]
        fn every_flipped_bit_is_noticed(at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let mut text = little().encode().unwrap();
            let at = at.index(text.len());
            text[at] ^= 1 << bit;
            let error = Manifest::decode("here", &text).unwrap_err().to_string();
            prop_assert!(error.contains("here"));
        }

        #[test]
        fn any_bytes_are_read_without_panic(text in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Manifest::decode("here", &text);
        }
    }
}
