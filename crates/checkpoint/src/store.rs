//! Storage backends for checkpoints: a local or shared file system, and S3-compatible object stores.
//!
//! A [`Store`] holds files under paths with `/` as separator. It requires only what both a file system and
//! an object store provide: sequential writes of files that never change afterwards, atomic replacement of
//! one small file, and reads of any byte range.

mod local;
mod location;
#[cfg(feature = "s3")]
mod object;
mod remote_error;
mod subfolder;

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::{CheckpointError, Lock, Result};

pub use local::LocalStore;
pub use location::Location;
#[cfg(feature = "s3")]
pub use object::ObjectStore;
pub use remote_error::RemoteErrorKind;
pub use subfolder::Subfolder;

/// A storage backend: files by path.
pub trait Store: Debug + Send + Sync {
    /// The full path or URL of `path`, for messages.
    fn describe(&self, path: &str) -> String;

    /// Begins to write a file. The file is durable when [`Writer::finish`] has returned.
    fn create(&self, path: &str) -> Result<Box<dyn Writer>>;

    /// Writes or replaces a file atomically: a concurrent reader sees either the old or the new content. The
    /// file is durable when this returns.
    fn put(&self, path: &str, bytes: &[u8]) -> Result<()>;

    /// The length of a file in bytes; `None` if it does not exist.
    fn size(&self, path: &str) -> Result<Option<u64>>;

    /// Reads a byte range of a file; fails if the file is shorter.
    fn read(&self, path: &str, range: Range<u64>) -> Result<Vec<u8>>;

    /// Reads ranges of a file in order and passes each to `each`. Backends with a high latency read ahead.
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

    /// The names of the files and directories in a directory; empty if it does not exist.
    fn list(&self, dir: &str) -> Result<Vec<String>>;

    /// Deletes a file. Succeeds if it does not exist.
    fn remove(&self, path: &str) -> Result<()>;

    /// Deletes a directory and its content. Succeeds if it does not exist.
    fn remove_dir(&self, dir: &str) -> Result<()>;

    /// Tries to lock a file, which it creates, against all other processes. `is_superseded` says that whoever may hold
    /// it now need not be respected; a store may still find it held, if only the holder can give it back.
    fn lock(&self, _path: &str, _is_superseded: bool) -> Result<Lock> {
        Ok(Lock::Unsupported)
    }

    /// How many bytes can still be written; `None` if that has no limit, or is not known.
    fn available_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}

/// A file that is being written.
pub trait Writer: Send {
    /// Appends bytes.
    fn write(&mut self, bytes: &[u8]) -> Result<()>;

    /// Completes the file and returns when it is durable.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// Opens the store at a location: a path, `file:///dir` or `s3://bucket/prefix`.
pub fn open(location: &Path) -> Result<Arc<dyn Store>> {
    open_location(Location::parse(location)?)
}

/// Opens the store at a location. A relative path is relative to `dir`; URLs are absolute.
pub fn open_under(dir: &Path, location: &Path) -> Result<Arc<dyn Store>> {
    open_location(Location::parse_under(dir, location)?)
}

fn open_location(location: Location) -> Result<Arc<dyn Store>> {
    match location {
        Location::Dir(dir) => Ok(Arc::new(LocalStore::new(dir))),
        Location::Bucket { bucket, prefix } => open_bucket(&bucket, &prefix),
    }
}

#[cfg(feature = "s3")]
fn open_bucket(bucket: &str, prefix: &str) -> Result<Arc<dyn Store>> {
    use std::ffi::OsString;

    // No variable that configures an object store has a name or value that is not UTF-8.
    let text = |(name, value): (OsString, OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    let variables = std::env::vars_os().filter_map(text);
    Ok(Arc::new(ObjectStore::new(bucket, prefix, variables)?))
}

#[cfg(not(feature = "s3"))]
fn open_bucket(bucket: &str, prefix: &str) -> Result<Arc<dyn Store>> {
    Err(CheckpointError::Location {
        location: format!("s3://{bucket}/{prefix}"),
        reason: "this program was built without object stores: build it with the feature `s3`"
            .to_owned(),
    })
}

/// The error of a read beyond the end of a file of `length` bytes.
fn too_short(path: &str, length: u64, range: &Range<u64>) -> CheckpointError {
    let reason = format!("cannot read bytes {range:?} of a file of {length} bytes");
    CheckpointError::io(path)(io::Error::new(io::ErrorKind::UnexpectedEof, reason))
}
