//! Files in memory, under a cap.
//!
//! A file lies in blocks of one size, so that it grows without being copied. What is being written
//! counts towards the cap from its first byte, and is given back if it is never finished.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const BLOCK: usize = 4 << 20;
/// What a file takes beside its bytes and its name, so that empty ones are not free.
const OVERHEAD: u64 = 256;

/// Why a file is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the holder is full: it keeps at most {capacity} bytes; give it more with --holder-bytes")]
pub(crate) struct Full {
    capacity: u64,
}

/// Files by path.
#[derive(Debug)]
pub(crate) struct Shelf {
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
    /// What it counts towards the cap.
    cost: u64,
}

/// A file that is being written.
#[derive(Debug)]
pub(crate) struct Draft {
    shelf: Arc<Shelf>,
    path: String,
    file: File,
}

impl Shelf {
    pub(crate) fn new(capacity: u64) -> Shelf {
        Shelf {
            capacity,
            contents: Mutex::default(),
        }
    }

    /// Bytes that are taken.
    pub(crate) fn used(&self) -> u64 {
        self.contents().used
    }

    pub(crate) fn create(self: &Arc<Shelf>, path: &str) -> Result<Draft, Full> {
        let mut draft = Draft {
            shelf: Arc::clone(self),
            path: path.to_owned(),
            file: File::default(),
        };
        draft.charge(path.len() as u64 + OVERHEAD)?;
        Ok(draft)
    }

    pub(crate) fn size(&self, path: &str) -> Option<u64> {
        self.contents().files.get(path).map(|file| file.num_bytes)
    }

    /// Bytes of a file; fewer than asked for where it ends.
    pub(crate) fn read(&self, path: &str, start: u64, length: usize) -> Option<Vec<u8>> {
        let file = self.contents().files.get(path).cloned()?;
        Some(file.read(start, length))
    }

    /// Names of files and folders in a folder.
    pub(crate) fn list(&self, folder: &str) -> BTreeSet<String> {
        let contents = self.contents();
        let inside = contents.files.range(within(folder));
        let names = inside.filter_map(|(path, _)| match folder {
            "" => path.split('/').next(),
            _ => path.get(folder.len() + 1..)?.split('/').next(),
        });
        names.map(str::to_owned).collect()
    }

    pub(crate) fn remove(&self, path: &str) {
        self.contents().remove(path);
    }

    pub(crate) fn remove_folder(&self, folder: &str) {
        let mut contents = self.contents();
        let inside = contents.files.range(within(folder));
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

impl Draft {
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), Full> {
        self.charge(bytes.len() as u64)?;
        self.file.append(bytes);
        Ok(())
    }

    /// Puts it in its place, in one step.
    pub(crate) fn finish(mut self) {
        let mut file = std::mem::take(&mut self.file);
        if let Some(last) = file.blocks.last_mut() {
            last.shrink_to_fit();
        }
        let mut contents = self.shelf.contents();
        contents.remove(&self.path);
        contents.files.insert(self.path.clone(), Arc::new(file));
    }

    fn charge(&mut self, cost: u64) -> Result<(), Full> {
        let capacity = self.shelf.capacity;
        let mut contents = self.shelf.contents();
        let used = contents.used.checked_add(cost);
        contents.used = used
            .filter(|used| *used <= capacity)
            .ok_or(Full { capacity })?;
        self.file.cost += cost;
        Ok(())
    }
}

impl Drop for Draft {
    /// What was finished costs nothing here any more.
    fn drop(&mut self) {
        self.shelf.contents().used -= self.file.cost;
    }
}

impl File {
    fn append(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.blocks.last().is_none_or(|last| last.len() == BLOCK) {
                self.blocks.push(Vec::new());
            }
            let Some(last) = self.blocks.last_mut() else {
                return;
            };
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK - last.len()));
            last.extend_from_slice(now);
            self.num_bytes += now.len() as u64;
            bytes = later;
        }
    }

    fn read(&self, start: u64, length: usize) -> Vec<u8> {
        let start = start.min(self.num_bytes);
        let end = start.saturating_add(length as u64).min(self.num_bytes);
        let (mut start, end) = (start as usize, end as usize);
        let mut bytes = Vec::with_capacity(end - start);
        while start < end {
            let (block, from) = (start / BLOCK, start % BLOCK);
            let to = BLOCK.min(from + end - start);
            bytes.extend_from_slice(&self.blocks[block][from..to]);
            start += to - from;
        }
        bytes
    }
}

/// The paths below a folder.
fn within(folder: &str) -> Range<String> {
    match folder {
        "" => String::new()..char::MAX.to_string().repeat(2),
        // The character after the slash.
        _ => format!("{folder}/")..format!("{folder}0"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn write(shelf: &Arc<Shelf>, path: &str, pieces: &[&[u8]]) -> Result<(), Full> {
        let mut draft = shelf.create(path)?;
        for piece in pieces {
            draft.append(piece)?;
        }
        draft.finish();
        Ok(())
    }

    #[test]
    fn a_draft_is_seen_when_it_is_finished() {
        let shelf = Arc::new(Shelf::new(1 << 20));
        let mut draft = shelf.create("a/b").unwrap();
        draft.append(b"hello").unwrap();
        assert_eq!(shelf.size("a/b"), None);
        draft.finish();
        assert_eq!(shelf.size("a/b"), Some(5));
        assert_eq!(shelf.read("a/b", 1, 3).unwrap(), b"ell");
        assert_eq!(shelf.read("a/b", 3, 100).unwrap(), b"lo");
        assert_eq!(shelf.read("a/b", u64::MAX, 100).unwrap(), b"");
        assert_eq!(shelf.read("b", 0, 1), None);
    }

    #[test]
    fn the_cap_holds_and_what_goes_is_given_back() {
        let shelf = Arc::new(Shelf::new(3 * OVERHEAD + 20));
        write(&shelf, "a", &[&[1; 10]]).unwrap();
        let taken = shelf.used();
        assert!(write(&shelf, "b", &[&[2; 5], &[2; 500]]).is_err());
        assert_eq!(shelf.used(), taken);
        assert_eq!(shelf.size("b"), None);
        write(&shelf, "a", &[&[3; 4]]).unwrap();
        assert_eq!(shelf.used(), taken - 6);
        shelf.remove("a");
        shelf.remove("a");
        assert_eq!(shelf.used(), 0);
        let many = (0..9).map(|i| write(&shelf, &i.to_string(), &[]));
        assert_eq!(many.filter(Result::is_ok).count(), 3);
    }

    #[test]
    fn folders_are_what_paths_say() {
        let shelf = Arc::new(Shelf::new(1 << 20));
        for path in ["s-1/a", "s-1/b", "s-1/c/d", "s-10/a", "s-1-x/a", "s-1", "é"] {
            write(&shelf, path, &[]).unwrap();
        }
        let list = |folder: &str| shelf.list(folder).into_iter().collect::<Vec<_>>();
        assert_eq!(list(""), ["s-1", "s-1-x", "s-10", "é"]);
        assert_eq!(list("s-1"), ["a", "b", "c"]);
        assert_eq!(list("s"), [""; 0]);
        shelf.remove_folder("s-1");
        assert_eq!(list(""), ["s-1", "s-1-x", "s-10", "é"]);
        assert_eq!((list("s-1"), shelf.size("s-1")), (vec![], Some(0)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn any_range_is_read_back(sizes in vec(0usize..3_000_000, 0..8), start in 0usize..12_000_000, length in 0usize..5_000_000) {
            let shelf = Arc::new(Shelf::new(1 << 30));
            let total: usize = sizes.iter().sum();
            let bytes: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
            let mut rest = &bytes[..];
            let mut pieces = Vec::new();
            for size in sizes {
                let (piece, later) = rest.split_at(size);
                pieces.push(piece);
                rest = later;
            }
            write(&shelf, "f", &pieces).unwrap();
            let start = start.min(total);
            let end = (start + length).min(total);
            prop_assert_eq!(shelf.size("f"), Some(total as u64));
            prop_assert!(shelf.read("f", start as u64, length).unwrap() == bytes[start..end]);
        }
    }
}
