//! Where checkpoints lie: a folder, or a bucket.
//!
//! A store holds files under paths with `/` between names. What is asked of it is little, so that a
//! file system and an object store can both do it: files are written from front to back and then stay
//! as they are; one small file can be put in its place in one step; any range can be read.

mod local;

use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::Result;

pub use local::LocalStore;

/// Files by path.
pub trait Store: Debug + Send + Sync {
    /// A path as a person would look for it.
    fn describe(&self, path: &str) -> String;

    /// Begins a file. It is there for sure when [`Sink::finish`] has returned.
    fn create(&self, path: &str) -> Result<Box<dyn Sink>>;

    /// Puts a file in its place, over one that may be there, in one step: whoever looks sees the old
    /// one or the new one, whole. It is there for sure when this returns.
    fn put(&self, path: &str, bytes: &[u8]) -> Result<()>;

    /// How long a file is; none if there is none.
    fn size(&self, path: &str) -> Result<Option<u64>>;

    /// These bytes of a file, all of them.
    fn read(&self, path: &str, range: Range<u64>) -> Result<Vec<u8>>;

    /// Names of files and folders in a folder; none in one that is not there.
    fn list(&self, folder: &str) -> Result<Vec<String>>;

    /// Deletes a file, if it is there.
    fn remove(&self, path: &str) -> Result<()>;

    /// Deletes a folder with all that is in it, if it is there.
    fn remove_folder(&self, folder: &str) -> Result<()>;
}

/// A file that is being written.
pub trait Sink: Send {
    /// Appends.
    fn write(&mut self, bytes: &[u8]) -> Result<()>;

    /// Returns when everything is where it survives a power cut.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// The store at a place: a folder of this machine.
pub fn open(place: &Path) -> Arc<dyn Store> {
    Arc::new(LocalStore::new(place))
}
