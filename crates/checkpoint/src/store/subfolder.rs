//! A directory of another store, as a store of its own.

use std::ops::Range;
use std::sync::Arc;

use super::{Store, Writer};
use crate::{Lock, Result};

/// The part of a store below one directory.
#[derive(Debug)]
pub struct Subfolder {
    store: Arc<dyn Store>,
    dir: String,
}

impl Subfolder {
    /// The directory `dir` of a store.
    pub fn new(store: Arc<dyn Store>, dir: impl Into<String>) -> Subfolder {
        Subfolder {
            store,
            dir: dir.into(),
        }
    }

    fn below(&self, path: &str) -> String {
        match path {
            "" => self.dir.clone(),
            path => format!("{}/{path}", self.dir),
        }
    }
}

impl Store for Subfolder {
    fn describe(&self, path: &str) -> String {
        self.store.describe(&self.below(path))
    }

    fn create(&self, path: &str) -> Result<Box<dyn Writer>> {
        self.store.create(&self.below(path))
    }

    fn put(&self, path: &str, bytes: &[u8]) -> Result<()> {
        self.store.put(&self.below(path), bytes)
    }

    fn size(&self, path: &str) -> Result<Option<u64>> {
        self.store.size(&self.below(path))
    }

    fn read(&self, path: &str, range: Range<u64>) -> Result<Vec<u8>> {
        self.store.read(&self.below(path), range)
    }

    fn read_each(
        &self,
        path: &str,
        ranges: &[Range<u64>],
        each: &mut dyn FnMut(Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        self.store.read_each(&self.below(path), ranges, each)
    }

    fn list(&self, dir: &str) -> Result<Vec<String>> {
        self.store.list(&self.below(dir))
    }

    fn remove(&self, path: &str) -> Result<()> {
        self.store.remove(&self.below(path))
    }

    fn remove_dir(&self, dir: &str) -> Result<()> {
        self.store.remove_dir(&self.below(dir))
    }

    fn lock(&self, path: &str, is_superseded: bool) -> Result<Lock> {
        self.store.lock(&self.below(path), is_superseded)
    }

    fn available_bytes(&self) -> Result<Option<u64>> {
        self.store.available_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store;

    #[test]
    fn subfolders_do_not_see_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let whole = store::open(dir.path()).unwrap();
        let a = Subfolder::new(Arc::clone(&whole), "a");
        let b = Subfolder::new(whole, "b");
        a.put("step-1/file", b"1").unwrap();
        assert_eq!(a.list("").unwrap(), ["step-1"]);
        assert_eq!(a.read("step-1/file", 0..1).unwrap(), b"1");
        assert!(b.list("").unwrap().is_empty());
        b.remove_dir("step-1").unwrap();
        assert_eq!(a.size("step-1/file").unwrap(), Some(1));
    }
}
