//! A store in a bucket of an S3-compatible object store: Amazon S3, MinIO, and many others.
//!
//! Uploads to a bucket are atomic and strongly consistent: an object is visible completely or not at all,
//! and every later listing shows it. So this store needs neither renames nor fsync.
//!
//! The crate `object_store` implements the protocol asynchronously. Each store runs it on one background
//! thread; the methods of [`Store`] block until a request is complete.

mod error_kind;
mod lease;
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

use super::{RemoteErrorKind, Store, Writer};
use crate::{CheckpointError, Lock, Result};

use error_kind::classify;
use upload::Upload;

/// The number of concurrent reads.
const CONCURRENT_READS: usize = 8;
/// Timeouts of a connection and of a request, and the time limit for retries. A request to a dead server
/// fails after at most the last two together.
const CONNECT_TIMEOUT: &str = "5 seconds";
const REQUEST_TIMEOUT: &str = "30 seconds";
const RETRY_TIMEOUT: Duration = Duration::from_secs(25);
/// The longest backoff between two retries.
const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// The prefix of the environment variables that configure endpoint, region and credentials.
const VARIABLE_PREFIX: &str = "AWS_";

/// A store under a prefix of a bucket.
#[derive(Debug)]
pub struct ObjectStore {
    bucket: Arc<Bucket>,
    /// How long a lock lasts whose holder is dead.
    lease: Duration,
}

/// The client of a bucket, shared by a store and its uploads.
#[derive(Debug)]
struct Bucket {
    name: String,
    prefix: String,
    client: AmazonS3,
    runtime: Runtime,
}

impl ObjectStore {
    /// Opens `prefix` of the bucket `name`. `variables` are environment variables: credentials, region and
    /// endpoint are read from the names that the AWS tools use.
    pub fn new(
        name: &str,
        prefix: &str,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<ObjectStore> {
        let rejected = |reason: String| CheckpointError::Location {
            location: format!("s3://{name}/{prefix}"),
            reason,
        };
        let builder = settings(variables);
        let value = |key: AmazonS3ConfigKey| builder.get_config_value(&key).unwrap_or_default();
        let endpoint = value(AmazonS3ConfigKey::Endpoint);
        let allow_http = value(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp));
        if endpoint.starts_with("http://") && allow_http != "true" {
            return Err(rejected(format!(
                "the endpoint {endpoint} is unencrypted HTTP: use https, or set AWS_ALLOW_HTTP=true to allow it"
            )));
        }
        // The client finds its cryptography here. An error means that the program has chosen one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = builder.with_bucket_name(name).build();
        let client = client.map_err(|error| rejected(error.to_string()))?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("object store")
            .enable_all()
            .build();
        let bucket = Bucket {
            name: name.to_owned(),
            prefix: prefix.to_owned(),
            client,
            runtime: runtime.map_err(|error| rejected(error.to_string()))?,
        };
        // Reject an invalid prefix now instead of at the first save.
        bucket.path("")?;
        Ok(ObjectStore {
            bucket: Arc::new(bucket),
            lease: lease::LEASE,
        })
    }

    /// The same store, with locks that last `lease` after their holder died instead of 30 seconds.
    pub fn with_lease(self, lease: Duration) -> ObjectStore {
        ObjectStore { lease, ..self }
    }
}

/// Our timeouts, overridden by the environment variables.
fn settings(variables: impl IntoIterator<Item = (String, String)>) -> AmazonS3Builder {
    let retry = RetryConfig {
        backoff: BackoffConfig {
            max_backoff: MAX_BACKOFF,
            ..BackoffConfig::default()
        },
        // Only the timeout limits the retries.
        max_retries: 1000,
        retry_timeout: RETRY_TIMEOUT,
    };
    let defaults = AmazonS3Builder::new()
        .with_retry(retry)
        .with_config(
            AmazonS3ConfigKey::Client(ClientConfigKey::ConnectTimeout),
            CONNECT_TIMEOUT,
        )
        .with_config(
            AmazonS3ConfigKey::Client(ClientConfigKey::Timeout),
            REQUEST_TIMEOUT,
        );
    variables
        .into_iter()
        .filter(|(name, _)| name.starts_with(VARIABLE_PREFIX))
        .filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value)))
        .fold(defaults, |builder, (key, value)| {
            builder.with_config(key, value)
        })
}

impl Bucket {
    /// The full object name of a file or directory; `.` components are dropped, as in a file system.
    fn path(&self, path: &str) -> Result<Path> {
        let names = self.prefix.split('/').chain(path.split('/'));
        let names: Vec<&str> = names
            .filter(|name| !name.is_empty() && *name != ".")
            .collect();
        Path::parse(names.join("/")).map_err(|error| CheckpointError::Location {
            location: format!("s3://{}/{}", self.name, names.join("/")),
            reason: format!("not a valid object name: {error}"),
        })
    }

    fn describe(&self, path: &Path) -> String {
        format!("s3://{}/{path}", self.name)
    }

    /// Blocks until a request is complete. Errors name `path`.
    fn wait<T>(
        &self,
        path: &Path,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        self.runtime
            .block_on(request)
            .map_err(|error| self.remote_error(path, error))
    }

    fn remote_error(&self, path: &Path, error: object_store::Error) -> CheckpointError {
        CheckpointError::Remote {
            path: self.describe(path),
            kind: classify(&error),
            source: Box::new(error),
        }
    }

    fn size(&self, path: &Path) -> Result<Option<u64>> {
        let request = async {
            match self.client.head(path).await {
                Ok(found) => Ok(Some(found.size)),
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        self.wait(path, request)
    }
}

impl Store for ObjectStore {
    fn describe(&self, path: &str) -> String {
        match self.bucket.path(path) {
            Ok(path) => self.bucket.describe(&path),
            Err(_) => format!("s3://{}/{}/{path}", self.bucket.name, self.bucket.prefix),
        }
    }

    fn create(&self, path: &str) -> Result<Box<dyn Writer>> {
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
        let mut in_flight = VecDeque::new();
        loop {
            let room = CONCURRENT_READS - in_flight.len();
            for range in waiting.by_ref().take(room) {
                let fetching = fetch(bucket.client.clone(), path.clone(), range.clone());
                in_flight.push_back((range, bucket.runtime.spawn(fetching)));
            }
            let Some((range, fetching)) = in_flight.pop_front() else {
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

    fn list(&self, dir: &str) -> Result<Vec<String>> {
        let dir = self.bucket.path(dir)?;
        let listed = self.bucket.client.list_with_delimiter(Some(&dir));
        let listed = self.bucket.wait(&dir, listed)?;
        let files = listed.objects.iter().map(|file| &file.location);
        let mut names: Vec<String> = files
            .chain(&listed.common_prefixes)
            .filter_map(|path| Some(path.filename()?.to_owned()))
            .collect();
        names.sort();
        // In a bucket an object and a common prefix may have the same name.
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

    fn remove_dir(&self, dir: &str) -> Result<()> {
        let dir = self.bucket.path(dir)?;
        let client = &self.bucket.client;
        let files = client.list(Some(&dir)).map_ok(|file| file.location);
        let removed = client.delete_stream(files.boxed());
        let removed = removed.try_for_each(|_| async { Ok(()) });
        self.bucket.wait(&dir, removed)
    }

    fn lock(&self, path: &str, is_superseded: bool) -> Result<Lock> {
        let path = self.bucket.path(path)?;
        lease::lock(&self.bucket, path, self.lease, is_superseded)
    }
}

/// The result of reading a range.
enum Fetched {
    Bytes(Vec<u8>),
    /// The range ends beyond the object, which has `size` bytes.
    Beyond {
        size: u64,
    },
}

async fn fetch(client: AmazonS3, path: Path, range: Range<u64>) -> object_store::Result<Fetched> {
    // HTTP has no empty range.
    if range.is_empty() {
        let size = client.head(&path).await?.size;
        return Ok(if range.start <= range.end && range.end <= size {
            Fetched::Bytes(Vec::new())
        } else {
            Fetched::Beyond { size }
        });
    }
    let options = GetOptions {
        range: Some(GetRange::Bounded(range.clone())),
        ..GetOptions::default()
    };
    match client.get_opts(&path, options).await {
        // The server truncates a range that ends beyond the object.
        Ok(response) if response.range != range => Ok(Fetched::Beyond {
            size: response.meta.size,
        }),
        Ok(response) => match response.bytes().await? {
            bytes if bytes.len() as u64 == range.end - range.start => {
                Ok(Fetched::Bytes(bytes.into()))
            }
            bytes => Ok(Fetched::Beyond {
                size: range.start + bytes.len() as u64,
            }),
        },
        // For a range that begins beyond the object, servers return different errors.
        Err(error) if classify(&error) == RemoteErrorKind::Other => {
            let size = client.head(&path).await?.size;
            if range.start >= size {
                Ok(Fetched::Beyond { size })
            } else {
                Err(error)
            }
        }
        Err(error) => Err(error),
    }
}
