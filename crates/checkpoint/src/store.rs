//! Where checkpoints lie: a folder, or a bucket.
//!
//! A store holds files under paths with `/` between names. What is asked of it is little, so that a
//! file system and an object store can both do it: files are written from front to back and then stay
//! as they are; one small file can be put in its place in one step; any range can be read.

mod local;
mod object;
mod place;

use std::ffi::OsString;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::{CheckpointError, Result};

pub use local::LocalStore;
pub use object::{ObjectStore, Trouble};
pub use place::Place;

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

    /// These ranges of a file, one after another, each given to `each` as it comes; read ahead where the
    /// way is long.
    fn read_each(
        &self,
        path: &str,
        ranges: &[Range<u64>],
        each: &mut dyn FnMut(Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        ranges
            .iter()
            .try_for_each(|range| each(self.read(path, range.clone())?))
    }

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

/// The store at a place as a person writes it: a path, `file:///folder` or `s3://bucket/prefix`.
pub fn open(place: &Path) -> Result<Arc<dyn Store>> {
    open_place(Place::parse(place)?)
}

/// The store at a place; a path that is relative is under `folder`, a URL stands for itself.
pub fn open_under(folder: &Path, place: &Path) -> Result<Arc<dyn Store>> {
    open_place(Place::parse_under(folder, place)?)
}

fn open_place(place: Place) -> Result<Arc<dyn Store>> {
    Ok(match place {
        Place::Folder(folder) => Arc::new(LocalStore::new(folder)),
        Place::Bucket { bucket, prefix } => {
            // Names and values that are no text are nobody's of ours.
            let text = |(name, value): (OsString, OsString)| {
                Some((name.into_string().ok()?, value.into_string().ok()?))
            };
            let variables = std::env::vars_os().filter_map(text);
            Arc::new(ObjectStore::new(&bucket, &prefix, variables)?)
        }
    })
}

/// A file ends before the bytes that were asked for.
fn too_short(path: &str, length: u64, range: &Range<u64>) -> CheckpointError {
    let reason = format!("it has {length} bytes, and {range:?} were asked for");
    CheckpointError::io(path)(io::Error::new(io::ErrorKind::UnexpectedEof, reason))
}
