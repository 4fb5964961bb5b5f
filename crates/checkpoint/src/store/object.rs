//! A bucket of an object store that speaks S3's protocol: Amazon's, MinIO, and many others.
//!
//! A bucket has what checkpoints need and little more: a file appears whole, in one step, or not at all,
//! and whoever lists after that sees it. So nothing is renamed and nothing is synced.
//!
//! The protocol is spoken by the crate `object_store`, which is asynchronous. A store has a thread of its
//! own for that; whoever calls it waits, as with any file.

mod trouble;
mod upload;

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientConfigKey, GetOptions, GetRange, ObjectStore as _, ObjectStoreExt as _,
    RetryConfig,
};
use tokio::runtime::{Builder, Runtime};

use super::{Sink, Store};
use crate::{CheckpointError, Result};

pub use trouble::Trouble;
use upload::Upload;

/// Reads under way at once.
const READS_AT_ONCE: usize = 8;
/// How long a server may take to accept a connection, and to answer a request; how long it is tried
/// again. A dead one is given up after the last two together, at most.
const CONNECTING: &str = "5 seconds";
const ANSWERING: &str = "30 seconds";
const TRYING: Duration = Duration::from_secs(25);
/// How long at most between one try and the next.
const PAUSING: Duration = Duration::from_secs(5);
/// What the names of the variables begin with that say where the server is and who is asking.
const VARIABLES: &str = "AWS_";

/// A part of a bucket.
#[derive(Debug)]
pub struct ObjectStore {
    bucket: Arc<Bucket>,
}

/// What a store and the files that it is writing share.
#[derive(Debug)]
struct Bucket {
    name: String,
    prefix: String,
    client: AmazonS3,
    runtime: Runtime,
}

impl ObjectStore {
    /// What is under `prefix` in a bucket. `variables` are those of the environment: they have keys,
    /// region and endpoint under the names that Amazon's own tools use.
    pub fn new(
        name: &str,
        prefix: &str,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<ObjectStore> {
        let refused = |reason: String| CheckpointError::Place {
            place: format!("s3://{name}/{prefix}"),
            reason,
        };
        let builder = settings(variables);
        let value = |key: AmazonS3ConfigKey| builder.get_config_value(&key).unwrap_or_default();
        let endpoint = value(AmazonS3ConfigKey::Endpoint);
        let allow_http = value(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp));
        if endpoint.starts_with("http://") && allow_http != "true" {
            return Err(refused(format!(
                "{endpoint} is plain HTTP, which anybody on the way can read: set AWS_ALLOW_HTTP=true if \
                 that is meant"
            )));
        }
        let client = builder.with_bucket_name(name).build();
        let client = client.map_err(|error| refused(error.to_string()))?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("object store")
            .enable_all()
            .build();
        let bucket = Bucket {
            name: name.to_owned(),
            prefix: prefix.to_owned(),
            client,
            runtime: runtime.map_err(|error| refused(error.to_string()))?,
        };
        // A prefix that no file can have is refused here and not at the first save.
        bucket.path("")?;
        Ok(ObjectStore {
            bucket: Arc::new(bucket),
        })
    }
}

/// What variables of the environment say, over limits of our own.
fn settings(variables: impl IntoIterator<Item = (String, String)>) -> AmazonS3Builder {
    let retry = RetryConfig {
        backoff: BackoffConfig {
            max_backoff: PAUSING,
            ..BackoffConfig::default()
        },
        // Time is the limit, not how often.
        max_retries: 1000,
        retry_timeout: TRYING,
    };
    let own = AmazonS3Builder::new()
        .with_retry(retry)
        .with_config(
            AmazonS3ConfigKey::Client(ClientConfigKey::ConnectTimeout),
            CONNECTING,
        )
        .with_config(
            AmazonS3ConfigKey::Client(ClientConfigKey::Timeout),
            ANSWERING,
        );
    variables
        .into_iter()
        .filter(|(name, _)| name.starts_with(VARIABLES))
        .filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value)))
        .fold(own, |builder, (key, value)| builder.with_config(key, value))
}

impl Bucket {
    /// The whole name of a file or folder; `.` is where one is, as in a file system.
    fn path(&self, path: &str) -> Result<Path> {
        let names = self.prefix.split('/').chain(path.split('/'));
        let names: Vec<&str> = names
            .filter(|name| !name.is_empty() && *name != ".")
            .collect();
        Path::parse(names.join("/")).map_err(|error| CheckpointError::Place {
            place: format!("s3://{}/{}", self.name, names.join("/")),
            reason: format!("no file can have this name: {error}"),
        })
    }

    fn describe(&self, path: &Path) -> String {
        format!("s3://{}/{path}", self.name)
    }

    /// Waits for what was asked for.
    fn wait<T>(
        &self,
        path: &Path,
        asked: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        self.runtime
            .block_on(asked)
            .map_err(|error| self.refused(path, error))
    }

    fn refused(&self, path: &Path, error: object_store::Error) -> CheckpointError {
        CheckpointError::Remote {
            path: self.describe(path),
            trouble: Trouble::of(&error),
            source: Box::new(error),
        }
    }

    fn size(&self, path: &Path) -> Result<Option<u64>> {
        let asked = async {
            match self.client.head(path).await {
                Ok(found) => Ok(Some(found.size)),
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        self.wait(path, asked)
    }
}

impl Store for ObjectStore {
    fn describe(&self, path: &str) -> String {
        match self.bucket.path(path) {
            Ok(path) => self.bucket.describe(&path),
            Err(_) => format!("s3://{}/{}/{path}", self.bucket.name, self.bucket.prefix),
        }
    }

    fn create(&self, path: &str) -> Result<Box<dyn Sink>> {
        let path = self.bucket.path(path)?;
        Ok(Box::new(Upload::new(Arc::clone(&self.bucket), path)))
    }

    fn put(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let path = self.bucket.path(path)?;
        let put = self.bucket.client.put(&path, bytes.to_vec().into());
        self.bucket.wait(&path, put).map(drop)
    }

    fn size(&self, path: &str) -> Result<Option<u64>> {
        self.bucket.size(&self.bucket.path(path)?)
    }

    fn read(&self, path: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let mut read = Vec::new();
        self.read_each(path, &[range], &mut |bytes| {
            read = bytes;
            Ok(())
        })?;
        Ok(read)
    }

    fn read_each(
        &self,
        path: &str,
        ranges: &[Range<u64>],
        each: &mut dyn FnMut(Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        let bucket = &self.bucket;
        let path = bucket.path(path)?;
        let mut waiting = ranges.iter();
        let mut under_way = VecDeque::new();
        loop {
            let room = READS_AT_ONCE - under_way.len();
            for range in waiting.by_ref().take(room) {
                let fetching = fetch(bucket.client.clone(), path.clone(), range.clone());
                under_way.push_back((range, bucket.runtime.spawn(fetching)));
            }
            let Some((range, fetching)) = under_way.pop_front() else {
                return Ok(());
            };
            match bucket.wait(&path, async { fetching.await? })? {
                Fetched::Bytes(bytes) => each(bytes)?,
                Fetched::Beyond { size } => {
                    return Err(super::too_short(&bucket.describe(&path), size, range));
                }
            }
        }
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let folder = self.bucket.path(folder)?;
        let listed = self.bucket.client.list_with_delimiter(Some(&folder));
        let listed = self.bucket.wait(&folder, listed)?;
        let files = listed.objects.iter().map(|file| &file.location);
        let mut names: Vec<String> = files
            .chain(&listed.common_prefixes)
            .filter_map(|path| Some(path.filename()?.to_owned()))
            .collect();
        names.sort();
        // A file and a folder may have the same name here.
        names.dedup();
        Ok(names)
    }

    fn remove(&self, path: &str) -> Result<()> {
        let path = self.bucket.path(path)?;
        let removed = async {
            match self.bucket.client.delete(&path).await {
                Err(object_store::Error::NotFound { .. }) => Ok(()),
                removed => removed,
            }
        };
        self.bucket.wait(&path, removed)
    }

    fn remove_folder(&self, folder: &str) -> Result<()> {
        let folder = self.bucket.path(folder)?;
        let client = &self.bucket.client;
        let files = client.list(Some(&folder)).map_ok(|file| file.location);
        let removed = client.delete_stream(files.boxed());
        let removed = removed.try_for_each(|_| async { Ok(()) });
        self.bucket.wait(&folder, removed)
    }
}

/// What came of asking for a range.
enum Fetched {
    Bytes(Vec<u8>),
    /// The file is shorter.
    Beyond {
        size: u64,
    },
}

async fn fetch(client: AmazonS3, path: Path, range: Range<u64>) -> object_store::Result<Fetched> {
    // Nobody can be asked for no bytes.
    if range.is_empty() {
        let size = client.head(&path).await?.size;
        return Ok(match range.start <= range.end && range.end <= size {
            true => Fetched::Bytes(Vec::new()),
            false => Fetched::Beyond { size },
        });
    }
    let options = GetOptions {
        range: Some(GetRange::Bounded(range.clone())),
        ..GetOptions::default()
    };
    match client.get_opts(&path, options).await {
        // Of a range that ends beyond the file the server sends what there is.
        Ok(answer) if answer.range != range => Ok(Fetched::Beyond {
            size: answer.meta.size,
        }),
        Ok(answer) => match answer.bytes().await? {
            bytes if bytes.len() as u64 == range.end - range.start => {
                Ok(Fetched::Bytes(bytes.into()))
            }
            bytes => Ok(Fetched::Beyond {
                size: range.start + bytes.len() as u64,
            }),
        },
        // Of one that is all beyond it the server sends nothing, in words of its own.
        Err(error) if Trouble::of(&error) == Trouble::Other => {
            let size = client.head(&path).await?.size;
            match range.start >= size {
                true => Ok(Fetched::Beyond { size }),
                false => Err(error),
            }
        }
        Err(error) => Err(error),
    }
}
