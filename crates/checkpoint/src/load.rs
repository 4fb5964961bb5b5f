//! Reading a checkpoint: any slice of any tensor, with every block read once and verified.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use trainyard_mesh::{Slice, overlaps};

use crate::digest::{BLOCK_BYTES, Digest};
use crate::manifest::{FORMAT_VERSION, FileEntry, MANIFEST, Manifest, TensorEntry, bytes_of};
use crate::step_dir::VERSION_1_STATE;
use crate::{CheckpointError, Result, Store, TrainState, hugging_face};

/// An open checkpoint: its manifest is in memory, its tensors are read on request.
#[derive(Debug)]
pub struct Checkpoint {
    store: Arc<dyn Store>,
    dir: String,
    manifest: Manifest,
}

/// A slice of a tensor to read.
#[derive(Clone, Debug)]
pub struct ReadRequest {
    /// The tensor's name.
    pub name: String,
    /// The elements to read.
    pub slice: Slice,
}

/// A byte range of a file, and where it goes in the result of a request.
struct Segment {
    start: u64,
    length: u64,
    /// The index of the request.
    request: usize,
    /// The byte offset in the request's result.
    to: u64,
}

/// Builds a manifest for a directory that has none: Hugging Face weights.
fn inferred_manifest(store: &dyn Store, dir: &str) -> Result<Manifest> {
    let path = format!("{dir}/{VERSION_1_STATE}");
    if store.size(&path)?.is_some() {
        return Err(CheckpointError::Version {
            path: store.describe(&path),
            found: 1,
            supported: FORMAT_VERSION,
        });
    }
    let reason = "not a checkpoint: it has neither a manifest nor Hugging Face safetensors files";
    hugging_face::manifest(store, dir)?
        .ok_or_else(|| CheckpointError::format(&store.describe(dir), reason))
}

impl Checkpoint {
    /// Opens a directory of a store: a checkpoint of this format, or Hugging Face weights.
    pub fn open(store: Arc<dyn Store>, dir: &str) -> Result<Checkpoint> {
        let path = format!("{dir}/{MANIFEST}");
        let manifest = match store.size(&path)? {
            Some(size) => {
                let text = store.read(&path, 0..size)?;
                return Checkpoint::from_manifest_bytes(store, dir, &text);
            }
            None => inferred_manifest(&*store, dir)?,
        };
        Ok(Checkpoint::with_manifest(store, dir, manifest))
    }

    /// Opens a directory whose manifest file another rank has read; `text` is that file.
    pub fn from_manifest_bytes(
        store: Arc<dyn Store>,
        dir: &str,
        text: &[u8],
    ) -> Result<Checkpoint> {
        let path = store.describe(&format!("{dir}/{MANIFEST}"));
        let manifest = Manifest::decode(&path, text)?;
        Ok(Checkpoint::with_manifest(store, dir, manifest))
    }

    pub(crate) fn with_manifest(
        store: Arc<dyn Store>,
        dir: &str,
        manifest: Manifest,
    ) -> Checkpoint {
        Checkpoint {
            store,
            dir: dir.to_owned(),
            manifest,
        }
    }

    /// The path or URL of the checkpoint.
    pub fn path(&self) -> String {
        self.store.describe(&self.dir)
    }

    /// The job's progress and config; `None` for weights without a job.
    pub fn state(&self) -> Option<&TrainState> {
        self.manifest.state.as_ref()
    }

    /// The manifest: all tensors and files.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The manifest entry of a tensor: its type, shape and chunks.
    pub fn tensor(&self, name: &str) -> Result<&TensorEntry> {
        let missing =
            || CheckpointError::tensor(&self.path(), name, "the checkpoint lacks this tensor");
        self.manifest.tensors.get(name).ok_or_else(missing)
    }

    /// Fails unless the tensors whose names begin with `prefix` are exactly `names`.
    pub fn expect_names<'a>(
        &self,
        prefix: &str,
        names: impl Iterator<Item = &'a str>,
    ) -> Result<()> {
        let expected: BTreeSet<&str> = names.collect();
        let found = self.manifest.tensors.keys().map(String::as_str);
        let found: BTreeSet<&str> = found.filter(|name| name.starts_with(prefix)).collect();
        let only_in = |a: &BTreeSet<&str>, b: &BTreeSet<&str>| -> Vec<String> {
            a.difference(b).map(|name| (*name).to_owned()).collect()
        };
        if expected == found {
            Ok(())
        } else {
            Err(CheckpointError::Names {
                path: self.path(),
                missing: only_in(&expected, &found),
                unexpected: only_in(&found, &expected),
            })
        }
    }

    /// Reads all requests. Calls `deliver` with the index of a request, a byte offset in its result, and the
    /// bytes that go there, in unspecified order.
    pub fn read(
        &self,
        requests: &[ReadRequest],
        mut deliver: impl FnMut(usize, usize, &[u8]) -> std::io::Result<()>,
    ) -> Result<()> {
        for (file, segments) in self.plan(requests)? {
            let Some(entry) = self.manifest.files.get(file) else {
                continue;
            };
            let blocks = by_block(&segments);
            let numbers: Vec<u64> = blocks.keys().copied().collect();
            self.read_blocks(file, entry, &numbers, |number, bytes| {
                for segment in &blocks[&number] {
                    let from = (segment.start - number * BLOCK_BYTES) as usize;
                    let bytes = &bytes[from..from + segment.length as usize];
                    deliver(segment.request, segment.to as usize, bytes)
                        .map_err(CheckpointError::io(self.path()))?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Reads all bytes of a tensor.
    pub fn read_tensor(&self, name: &str) -> Result<Vec<u8>> {
        let tensor = self.tensor(name)?;
        self.read_slice(&ReadRequest {
            name: name.to_owned(),
            slice: Slice::full(&tensor.shape),
        })
    }

    /// Reads the bytes of one slice of a tensor.
    pub fn read_slice(&self, request: &ReadRequest) -> Result<Vec<u8>> {
        let dtype = self.tensor(&request.name)?.dtype;
        let mut result = vec![0; bytes_of(&request.slice.shape(), dtype).unwrap_or(0) as usize];
        let requests = std::slice::from_ref(request);
        self.read(requests, |_, start, bytes| {
            result[start..start + bytes.len()].copy_from_slice(bytes);
            Ok(())
        })?;
        Ok(result)
    }

    /// The segments of every file that the requests need.
    fn plan(&self, requests: &[ReadRequest]) -> Result<BTreeMap<&str, Vec<Segment>>> {
        let mut plan: BTreeMap<&str, Vec<Segment>> = BTreeMap::new();
        for (index, request) in requests.iter().enumerate() {
            let tensor = self.tensor(&request.name)?;
            let rejected = |reason| CheckpointError::tensor(&self.path(), &request.name, reason);
            if !tensor.dtype.bitsize().is_multiple_of(8) {
                return Err(rejected("its element type is smaller than a byte"));
            }
            if request.slice.region.lengths.len() != tensor.shape.len() {
                return Err(rejected(
                    "it has another number of dimensions than in the job",
                ));
            }
            let width = tensor.dtype.bitsize() as u64 / 8;
            let mut covered = Vec::new();
            for chunk in &tensor.chunks {
                for overlap in overlaps(&chunk.slice, &request.slice, &tensor.shape) {
                    covered.push(overlap.to..overlap.to + overlap.length);
                    plan.entry(&chunk.file).or_default().push(Segment {
                        start: chunk.byte_offset + overlap.from as u64 * width,
                        length: overlap.length as u64 * width,
                        request: index,
                        to: overlap.to as u64 * width,
                    });
                }
            }
            if !is_partition(covered, request.slice.num_elements()) {
                return Err(rejected(
                    "its chunks do not cover the requested slice exactly once",
                ));
            }
        }
        Ok(plan)
    }

    /// Reads blocks of a file, verifies their digests, and passes them to `each`.
    fn read_blocks(
        &self,
        file: &str,
        entry: &FileEntry,
        numbers: &[u64],
        mut each: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let path = format!("{}/{file}", self.dir);
        let range =
            |number: u64| number * BLOCK_BYTES..entry.num_bytes.min((number + 1) * BLOCK_BYTES);
        let ranges: Vec<Range<u64>> = numbers.iter().copied().map(range).collect();
        let mut remaining = numbers.iter().zip(&ranges);
        self.store.read_each(&path, &ranges, &mut |bytes| {
            let Some((&number, range)) = remaining.next() else {
                return Ok(());
            };
            let digests = entry.block_digests.as_ref();
            let expected = digests.map(|digests| digests[number as usize]);
            if expected.is_some_and(|expected| expected != Digest::of(&bytes)) {
                return Err(CheckpointError::Corrupted {
                    path: self.store.describe(&path),
                    reason: format!(
                        "the digest of bytes {} to {} does not match the manifest",
                        range.start, range.end
                    ),
                });
            }
            each(number, &bytes)
        })
    }

    /// Reads the whole checkpoint and verifies the length and the digests of every file. Calls `progress`
    /// with the number of bytes verified since the last call.
    pub fn verify(&self, mut progress: impl FnMut(u64)) -> Result<()> {
        for (file, entry) in &self.manifest.files {
            let path = format!("{}/{file}", self.dir);
            let size = self.store.size(&path)?;
            if size != Some(entry.num_bytes) {
                let reason = match size {
                    Some(size) => format!("it has {size} bytes instead of {}", entry.num_bytes),
                    None => "the file is missing".to_owned(),
                };
                return Err(CheckpointError::Corrupted {
                    path: self.store.describe(&path),
                    reason,
                });
            }
            let numbers: Vec<u64> = (0..entry.num_bytes.div_ceil(BLOCK_BYTES)).collect();
            self.read_blocks(file, entry, &numbers, |_, bytes| {
                progress(bytes.len() as u64);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// A file that the manifest names and the directory lacks, if there is one.
    pub(crate) fn missing_file(&self) -> Result<Option<&str>> {
        let found: BTreeSet<String> = self.store.list(&self.dir)?.into_iter().collect();
        let mut named = self.manifest.files.keys().map(String::as_str);
        Ok(named.find(|file| !found.contains(*file)))
    }
}

/// Whether the ranges cover `0..length` without a hole or an overlap.
fn is_partition(mut ranges: Vec<Range<usize>>, length: usize) -> bool {
    ranges.sort_unstable_by_key(|range| (range.start, range.end));
    let mut end = 0;
    for range in ranges {
        if range.start != end {
            return false;
        }
        end = range.end;
    }
    end == length
}

/// Splits segments at block boundaries and groups them by block number.
fn by_block(segments: &[Segment]) -> BTreeMap<u64, Vec<Segment>> {
    let mut blocks: BTreeMap<u64, Vec<Segment>> = BTreeMap::new();
    for segment in segments {
        let (mut start, end) = (segment.start, segment.start + segment.length);
        while start < end {
            let number = start / BLOCK_BYTES;
            let length = end.min((number + 1) * BLOCK_BYTES) - start;
            blocks.entry(number).or_default().push(Segment {
                start,
                length,
                request: segment.request,
                to: segment.to + start - segment.start,
            });
            start += length;
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many elements as requested do not prove that each is there.
    #[test]
    fn holes_and_overlaps_are_found() {
        assert!(is_partition(vec![4..8, 0..4], 8));
        assert!(is_partition(vec![], 0));
        for (case, ranges) in [
            ("a hole", vec![0..3, 4..8]),
            ("a hole and an overlap", vec![0..4, 2..4, 6..8]),
            ("too long", vec![0..4, 4..9]),
            ("too short", vec![0..4, 4..7]),
            ("nothing", vec![]),
        ] {
            assert!(!is_partition(ranges, 8), "{case}");
        }
    }
}
