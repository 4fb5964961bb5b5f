//! Reading a checkpoint: any part of any tensor, each block of a file once and checked.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use trainyard_mesh::{Slice, overlaps};

use crate::digest::{BLOCK, Digest};
use crate::manifest::{FileEntry, MANIFEST, Manifest, TensorEntry, bytes_of};
use crate::{CheckpointError, Result, Store, TrainState, hugging_face, version_1};

/// A checkpoint whose manifest has been read; its tensors are read when asked for.
#[derive(Debug)]
pub struct Checkpoint {
    store: Arc<dyn Store>,
    folder: String,
    manifest: Manifest,
}

/// A part of a tensor that somebody wants.
#[derive(Clone, Debug)]
pub struct Want {
    /// The tensor's name.
    pub name: String,
    /// Which part of it.
    pub slice: Slice,
}

/// Bytes of a file that belong somewhere.
struct Segment {
    start: u64,
    length: u64,
    /// For which wish, and where in it.
    want: usize,
    to: u64,
}

/// What would be the manifest of a folder that has none.
fn foreign(store: &dyn Store, folder: &str) -> Result<Manifest> {
    let state = store.size(&format!("{folder}/{}", version_1::STATE_FILE))?;
    if state.is_some() {
        return version_1::manifest(store, folder);
    }
    let reason = "no checkpoint: it has neither a manifest nor files of Hugging Face's";
    hugging_face::manifest(store, folder)?
        .ok_or_else(|| CheckpointError::format(&store.describe(folder), reason))
}

impl Checkpoint {
    /// Opens a folder of a store, of whichever version, or one of Hugging Face's.
    pub fn open(store: Arc<dyn Store>, folder: &str) -> Result<Checkpoint> {
        let path = format!("{folder}/{MANIFEST}");
        let manifest = match store.size(&path)? {
            Some(size) => {
                let text = store.read(&path, 0..size)?;
                return Checkpoint::with_text(store, folder, &text);
            }
            None => foreign(&*store, folder)?,
        };
        Ok(Checkpoint::with_manifest(store, folder, manifest))
    }

    /// Opens a folder whose manifest somebody else has read.
    pub fn with_text(store: Arc<dyn Store>, folder: &str, text: &[u8]) -> Result<Checkpoint> {
        let path = store.describe(&format!("{folder}/{MANIFEST}"));
        let manifest = Manifest::decode(&path, text)?;
        Ok(Checkpoint::with_manifest(store, folder, manifest))
    }

    pub(crate) fn with_manifest(
        store: Arc<dyn Store>,
        folder: &str,
        manifest: Manifest,
    ) -> Checkpoint {
        Checkpoint {
            store,
            folder: folder.to_owned(),
            manifest,
        }
    }

    /// Where it is.
    pub fn path(&self) -> String {
        self.store.describe(&self.folder)
    }

    /// Where the job stood, if it is a job's.
    pub fn state(&self) -> Option<&TrainState> {
        self.manifest.state.as_ref()
    }

    /// What is in it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// A tensor without its elements.
    pub fn tensor(&self, name: &str) -> Result<&TensorEntry> {
        let missing = || CheckpointError::tensor(&self.path(), name, "is not there");
        self.manifest.tensors.get(name).ok_or_else(missing)
    }

    /// Refuses where the tensors whose names begin with `prefix` are not exactly `names`.
    pub fn expect_names<'a>(
        &self,
        prefix: &str,
        names: impl Iterator<Item = &'a str>,
    ) -> Result<()> {
        let wanted: BTreeSet<&str> = names.collect();
        let there = self.manifest.tensors.keys().map(String::as_str);
        let there: BTreeSet<&str> = there.filter(|name| name.starts_with(prefix)).collect();
        let only_in = |a: &BTreeSet<&str>, b: &BTreeSet<&str>| -> Vec<String> {
            a.difference(b).map(|name| (*name).to_owned()).collect()
        };
        match wanted == there {
            true => Ok(()),
            false => Err(CheckpointError::Names {
                path: self.path(),
                missing: only_in(&wanted, &there),
                unexpected: only_in(&there, &wanted),
            }),
        }
    }

    /// Reads what is wanted. `deliver` gets the number of a wish, where in its bytes these belong, and
    /// the bytes; in what order they come is left open.
    pub fn read(
        &self,
        wants: &[Want],
        mut deliver: impl FnMut(usize, usize, &[u8]) -> std::io::Result<()>,
    ) -> Result<()> {
        for (file, segments) in self.plan(wants)? {
            let Some(entry) = self.manifest.files.get(file) else {
                continue;
            };
            let blocks = by_block(&segments);
            let numbers: Vec<u64> = blocks.keys().copied().collect();
            self.read_blocks(file, entry, &numbers, |number, bytes| {
                for segment in &blocks[&number] {
                    let from = (segment.start - number * BLOCK) as usize;
                    let bytes = &bytes[from..from + segment.length as usize];
                    deliver(segment.want, segment.to as usize, bytes)
                        .map_err(CheckpointError::io(self.path()))?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// All bytes of a tensor.
    pub fn whole(&self, name: &str) -> Result<Vec<u8>> {
        let tensor = self.tensor(name)?;
        self.part(&Want {
            name: name.to_owned(),
            slice: Slice::whole(&tensor.shape),
        })
    }

    /// The bytes of a part of a tensor.
    pub fn part(&self, want: &Want) -> Result<Vec<u8>> {
        let dtype = self.tensor(&want.name)?.dtype;
        let mut bytes = vec![0; bytes_of(&want.slice.shape(), dtype).unwrap_or(0) as usize];
        let wants = std::slice::from_ref(want);
        self.read(wants, |_, start, piece| {
            bytes[start..start + piece.len()].copy_from_slice(piece);
            Ok(())
        })?;
        Ok(bytes)
    }

    /// Which bytes of which files are needed for what.
    fn plan(&self, wants: &[Want]) -> Result<BTreeMap<&str, Vec<Segment>>> {
        let mut plan: BTreeMap<&str, Vec<Segment>> = BTreeMap::new();
        for (index, want) in wants.iter().enumerate() {
            let tensor = self.tensor(&want.name)?;
            let refused = |reason| CheckpointError::tensor(&self.path(), &want.name, reason);
            if !tensor.dtype.bitsize().is_multiple_of(8) {
                return Err(refused("its elements do not fill bytes"));
            }
            if want.slice.region.lengths.len() != tensor.shape.len() {
                return Err(refused("it has other dimensions than the job's"));
            }
            let width = tensor.dtype.bitsize() as u64 / 8;
            let mut found = 0;
            for piece in &tensor.pieces {
                for overlap in overlaps(&piece.slice, &want.slice, &tensor.shape) {
                    found += overlap.length;
                    plan.entry(&piece.file).or_default().push(Segment {
                        start: piece.start + overlap.from as u64 * width,
                        length: overlap.length as u64 * width,
                        want: index,
                        to: overlap.to as u64 * width,
                    });
                }
            }
            if found != want.slice.num_elements() {
                return Err(refused(
                    "its parts do not make up the whole, each element once",
                ));
            }
        }
        Ok(plan)
    }

    /// Reads blocks of a file and gives each to `each`, checked.
    fn read_blocks(
        &self,
        file: &str,
        entry: &FileEntry,
        numbers: &[u64],
        mut each: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let path = format!("{}/{file}", self.folder);
        let place = |number: u64| number * BLOCK..entry.num_bytes.min((number + 1) * BLOCK);
        let ranges: Vec<Range<u64>> = numbers.iter().copied().map(place).collect();
        let mut due = numbers.iter().zip(&ranges);
        self.store.read_each(&path, &ranges, &mut |bytes| {
            let Some((&number, range)) = due.next() else {
                return Ok(());
            };
            let expected = entry.blocks.as_ref().map(|blocks| blocks[number as usize]);
            if expected.is_some_and(|expected| expected != Digest::of(&bytes)) {
                return Err(CheckpointError::Damaged {
                    path: self.store.describe(&path),
                    what: format!("bytes {} to {} have another digest", range.start, range.end),
                });
            }
            each(number, &bytes)
        })
    }

    /// Reads everything and checks it: every file's length and digests.
    pub fn verify(&self, mut progress: impl FnMut(u64)) -> Result<()> {
        for (file, entry) in &self.manifest.files {
            let path = format!("{}/{file}", self.folder);
            let size = self.store.size(&path)?;
            if size != Some(entry.num_bytes) {
                let size = size.map_or("none".to_owned(), |size| size.to_string());
                return Err(CheckpointError::Damaged {
                    path: self.store.describe(&path),
                    what: format!("it has {size} of {} bytes", entry.num_bytes),
                });
            }
            let numbers: Vec<u64> = (0..entry.num_bytes.div_ceil(BLOCK)).collect();
            self.read_blocks(file, entry, &numbers, |_, bytes| {
                progress(bytes.len() as u64);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// A file that the manifest names and the folder lacks.
    pub(crate) fn missing_file(&self) -> Result<Option<&str>> {
        let there: BTreeSet<String> = self.store.list(&self.folder)?.into_iter().collect();
        let mut named = self.manifest.files.keys().map(String::as_str);
        Ok(named.find(|file| !there.contains(*file)))
    }
}

/// The same bytes, cut where blocks end, by the number of the block they lie in.
fn by_block(segments: &[Segment]) -> BTreeMap<u64, Vec<Segment>> {
    let mut blocks: BTreeMap<u64, Vec<Segment>> = BTreeMap::new();
    for segment in segments {
        let (mut start, end) = (segment.start, segment.start + segment.length);
        while start < end {
            let number = start / BLOCK;
            let length = end.min((number + 1) * BLOCK) - start;
            blocks.entry(number).or_default().push(Segment {
                start,
                length,
                want: segment.want,
                to: segment.to + start - segment.start,
            });
            start += length;
        }
    }
    blocks
}
