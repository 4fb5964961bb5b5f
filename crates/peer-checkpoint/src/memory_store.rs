//! Files in memory, with a limit on their total size.
//!
//! A file is a list of blocks of one size, so it grows without being copied. A partial file counts towards the limit
//! from its first byte, and no longer counts if it is dropped unfinished.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const BLOCK_BYTES: usize = 4 << 20;
/// What a file costs besides its bytes and its name, so that empty files are not free.
const OVERHEAD_BYTES: u64 = 256;

/// A file does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the replica server is full: it keeps at most {capacity} bytes; raise --replica-bytes")]
pub(crate) struct CapacityError {
    capacity: u64,
}

/// Files by path, up to a total of `capacity` bytes.
#[derive(Debug)]
pub(crate) struct MemoryStore {
    capacity: u64,
    contents: Mutex<Contents>,
}

#[derive(Debug, Default)]
struct Contents {
    files: BTreeMap<String, Arc<File>>,
    used: u64,
}

#[derive(Debug, Default)]
struct File {
    blocks: Vec<Vec<u8>>,
    num_bytes: u64,
    /// How many bytes it counts towards the capacity.
    cost: u64,
}

/// A file that is being written.
#[derive(Debug)]
pub(crate) struct PartialFile {
    store: Arc<MemoryStore>,
    path: String,
    file: File,
}

impl MemoryStore {
    pub(crate) fn new(capacity: u64) -> MemoryStore {
        MemoryStore {
            capacity,
            contents: Mutex::default(),
        }
    }

    /// How many bytes the files take.
    pub(crate) fn num_bytes(&self) -> u64 {
        self.contents().used
    }

    pub(crate) fn create(
        self: &Arc<MemoryStore>,
        path: &str,
    ) -> Result<PartialFile, CapacityError> {
        let mut file = PartialFile {
            store: Arc::clone(self),
            path: path.to_owned(),
            file: File::default(),
        };
        file.charge(path.len() as u64 + OVERHEAD_BYTES)?;
        Ok(file)
    }

    pub(crate) fn size(&self, path: &str) -> Option<u64> {
        self.contents().files.get(path).map(|file| file.num_bytes)
    }

    /// Reads a range of a file; shorter than `length` if the file ends before.
    pub(crate) fn read(&self, path: &str, start: u64, length: usize) -> Option<Vec<u8>> {
        let file = self.contents().files.get(path).cloned()?;
        Some(file.read(start, length))
    }

    /// The names of the files and directories in a directory.
    pub(crate) fn list(&self, dir: &str) -> BTreeSet<String> {
        let contents = self.contents();
        let inside = contents.files.range(paths_below(dir));
        let names = inside.filter_map(|(path, _)| match dir {
            "" => path.split('/').next(),
            _ => path.get(dir.len() + 1..)?.split('/').next(),
        });
        names.map(str::to_owned).collect()
    }

    pub(crate) fn remove(&self, path: &str) {
        self.contents().remove(path);
    }

    pub(crate) fn remove_dir(&self, dir: &str) {
        let mut contents = self.contents();
        let inside = contents.files.range(paths_below(dir));
        let paths: Vec<String> = inside.map(|(path, _)| path.clone()).collect();
        for path in paths {
            contents.remove(&path);
        }
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Contents {
    fn remove(&mut self, path: &str) {
        if let Some(file) = self.files.remove(path) {
            self.used -= file.cost;
        }
    }
}

impl PartialFile {
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), CapacityError> {
        self.charge(bytes.len() as u64)?;
        self.file.append(bytes);
        Ok(())
    }

    /// Makes the file visible under its path, atomically.
    pub(crate) fn finish(mut self) {
        let mut file = std::mem::take(&mut self.file);
        if let Some(last) = file.blocks.last_mut() {
            last.shrink_to_fit();
        }
        let mut contents = self.store.contents();
        contents.remove(&self.path);
        contents.files.insert(self.path.clone(), Arc::new(file));
    }

    fn charge(&mut self, cost: u64) -> Result<(), CapacityError> {
        let capacity = self.store.capacity;
        let mut contents = self.store.contents();
        let used = contents.used.checked_add(cost);
        contents.used = used
            .filter(|used| *used <= capacity)
            .ok_or(CapacityError { capacity })?;
        self.file.cost += cost;
        Ok(())
    }
}

impl Drop for PartialFile {
    /// A finished file has moved out, and its cost with it.
    fn drop(&mut self) {
        self.store.contents().used -= self.file.cost;
    }
}

impl File {
    fn append(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self
                .blocks
                .last()
                .is_none_or(|last| last.len() == BLOCK_BYTES)
            {
                self.blocks.push(Vec::new());
            }
            let Some(last) = self.blocks.last_mut() else {
                return;
            };
            let (head, rest) = bytes.split_at(bytes.len().min(BLOCK_BYTES - last.len()));
            last.extend_from_slice(head);
            self.num_bytes += head.len() as u64;
            bytes = rest;
        }
    }

    fn read(&self, start: u64, length: usize) -> Vec<u8> {
        let start = start.min(self.num_bytes);
        let end = start.saturating_add(length as u64).min(self.num_bytes);
        let (mut start, end) = (start as usize, end as usize);
        let mut bytes = Vec::with_capacity(end - start);
        while start < end {
            let (block, from) = (start / BLOCK_BYTES, start % BLOCK_BYTES);
            let to = BLOCK_BYTES.min(from + end - start);
            bytes.extend_from_slice(&self.blocks[block][from..to]);
            start += to - from;
        }
        bytes
    }
}

/// The paths below a directory.
fn paths_below(dir: &str) -> Range<String> {
    match dir {
        "" => String::new()..char::MAX.to_string().repeat(2),
        // `0` is the character after `/`.
        _ => format!("{dir}/")..format!("{dir}0"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn write(store: &Arc<MemoryStore>, path: &str, chunks: &[&[u8]]) -> Result<(), CapacityError> {
        let mut file = store.create(path)?;
        for chunk in chunks {
            file.append(chunk)?;
        }
        file.finish();
        Ok(())
    }

    #[test]
    fn a_file_is_visible_when_it_is_finished() {
        let store = Arc::new(MemoryStore::new(1 << 20));
        let mut file = store.create("a/b").unwrap();
        file.append(b"hello").unwrap();
        assert_eq!(store.size("a/b"), None);
        file.finish();
        assert_eq!(store.size("a/b"), Some(5));
        assert_eq!(store.read("a/b", 1, 3).unwrap(), b"ell");
        assert_eq!(store.read("a/b", 3, 100).unwrap(), b"lo");
        assert_eq!(store.read("a/b", u64::MAX, 100).unwrap(), b"");
        assert_eq!(store.read("b", 0, 1), None);
    }

    #[test]
    fn the_capacity_is_enforced_and_removed_files_free_it() {
        let store = Arc::new(MemoryStore::new(3 * OVERHEAD_BYTES + 20));
        write(&store, "a", &[&[1; 10]]).unwrap();
        let taken = store.num_bytes();
        assert!(write(&store, "b", &[&[2; 5], &[2; 500]]).is_err());
        assert_eq!(store.num_bytes(), taken);
        assert_eq!(store.size("b"), None);
        write(&store, "a", &[&[3; 4]]).unwrap();
        assert_eq!(store.num_bytes(), taken - 6);
        store.remove("a");
        store.remove("a");
        assert_eq!(store.num_bytes(), 0);
        let many = (0..9).map(|i| write(&store, &i.to_string(), &[]));
        assert_eq!(many.filter(Result::is_ok).count(), 3);
    }

    #[test]
    fn directories_follow_from_paths() {
        let store = Arc::new(MemoryStore::new(1 << 20));
        for path in ["s-1/a", "s-1/b", "s-1/c/d", "s-10/a", "s-1-x/a", "s-1", "é"] {
            write(&store, path, &[]).unwrap();
        }
        let list = |dir: &str| store.list(dir).into_iter().collect::<Vec<_>>();
        assert_eq!(list(""), ["s-1", "s-1-x", "s-10", "é"]);
        assert_eq!(list("s-1"), ["a", "b", "c"]);
        assert_eq!(list("s"), [""; 0]);
        store.remove_dir("s-1");
        assert_eq!(list(""), ["s-1", "s-1-x", "s-10", "é"]);
        assert_eq!((list("s-1"), store.size("s-1")), (vec![], Some(0)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn any_range_is_read_back(
            sizes in vec(0usize..3_000_000, 0..8), start in 0usize..12_000_000, length in 0usize..5_000_000,
        ) {
            let store = Arc::new(MemoryStore::new(1 << 30));
            let total: usize = sizes.iter().sum();
            let bytes: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
            let mut rest = &bytes[..];
            let mut chunks = Vec::new();
            for size in sizes {
                let (chunk, later) = rest.split_at(size);
                chunks.push(chunk);
                rest = later;
            }
            write(&store, "f", &chunks).unwrap();
            let start = start.min(total);
            let end = (start + length).min(total);
            prop_assert_eq!(store.size("f"), Some(total as u64));
            prop_assert!(store.read("f", start as u64, length).unwrap() == bytes[start..end]);
        }
    }
}
