//! A lock in a bucket: a lease that its holder renews.
//!
//! An object store has no locks that end with a process, but it replaces an object on the condition that nobody else
//! has replaced it. The holder writes the lease object again three times per [`LEASE`]. A process that wants the lock
//! watches the object for that long: if it changes, its holder lives; if not, the process replaces exactly the version
//! that it watched, so of two that wait only one succeeds. Nobody compares clocks of two hosts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use object_store::aws::AmazonS3;
use object_store::path::Path;
use object_store::{
    Error, ObjectStore as _, ObjectStoreExt as _, PutMode, PutResult, UpdateVersion,
};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::Bucket;
use crate::owner::unique_token;
use crate::{Lock, Result};

/// How long a lease lasts that is not renewed.
pub(super) const LEASE: Duration = Duration::from_secs(30);

/// The content of a lease object.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Content {
    /// Differs for every holder.
    token: String,
    /// Counts the renewals, so that every version differs from the one before.
    num_renewals: u64,
    /// Whether the holder has given the lease back.
    is_released: bool,
}

/// One lease object of a bucket.
#[derive(Clone)]
struct LeaseObject {
    client: AmazonS3,
    path: Path,
    duration: Duration,
}

/// A held lease. Dropping it gives it back.
struct Held {
    bucket: Arc<Bucket>,
    object: LeaseObject,
    /// Ends the renewals when it is dropped.
    stop: Option<oneshot::Sender<()>>,
    /// Returns what to replace to give the lease back; `None` if it was lost.
    renewals: Option<JoinHandle<Option<(UpdateVersion, Content)>>>,
}

/// Tries to get the lease at `path`; waits for `duration` if its holder may be dead, and not at all if it `is_superseded`.
pub(super) fn lock(
    bucket: &Arc<Bucket>,
    path: Path,
    duration: Duration,
    is_superseded: bool,
) -> Result<Lock> {
    let object = LeaseObject {
        client: bucket.client.clone(),
        path,
        duration,
    };
    let content = Content {
        token: unique_token()?,
        ..Content::default()
    };
    let Some(version) = bucket.wait(&object.path, object.acquire(&content, is_superseded))? else {
        return Ok(Lock::Held);
    };
    let (stop, stopped) = oneshot::channel();
    let renewals = object.clone().renew(version, content, stopped);
    Ok(Lock::Acquired(Box::new(Held {
        bucket: Arc::clone(bucket),
        object,
        stop: Some(stop),
        renewals: Some(bucket.runtime.spawn(renewals)),
    })))
}

impl LeaseObject {
    /// Writes the object, if that is allowed; the version written, or `None` if another process holds the lease.
    async fn acquire(
        &self,
        content: &Content,
        is_superseded: bool,
    ) -> object_store::Result<Option<UpdateVersion>> {
        if is_superseded {
            return self.put(content, PutMode::Overwrite).await;
        }
        match self.read().await? {
            None => self.put(content, PutMode::Create).await,
            Some((version, before)) if before.is_released || self.has_expired(&version).await? => {
                self.put(content, PutMode::Update(version)).await
            }
            Some(_) => Ok(None),
        }
    }

    /// Watches the object for as long as a lease lasts; whether it is still `version`.
    async fn has_expired(&self, version: &UpdateVersion) -> object_store::Result<bool> {
        tracing::info!(
            "waiting {} s whether another job renews its lease {}",
            self.duration.as_secs_f32(),
            self.path
        );
        let start = Instant::now();
        while start.elapsed() < self.duration {
            sleep(self.duration / 10).await;
            let head = self.client.head(&self.path).await?;
            if head.e_tag != version.e_tag {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Renews the lease until it is lost or `stopped`; the last version and its content, unless it was lost.
    async fn renew(
        self,
        mut version: UpdateVersion,
        mut content: Content,
        mut stopped: oneshot::Receiver<()>,
    ) -> Option<(UpdateVersion, Content)> {
        while timeout(self.duration / 3, &mut stopped).await.is_err() {
            content.num_renewals += 1;
            match self.put(&content, PutMode::Update(version.clone())).await {
                Ok(Some(renewed)) => version = renewed,
                Ok(None) => return None,
                // The next renewal may succeed, or find that the lease is lost.
                Err(error) => tracing::warn!("cannot renew the lease {}: {error}", self.path),
            }
        }
        Some((version, content))
    }

    /// The version written, by this or an earlier request of this process; `None` if another process wrote meanwhile.
    async fn put(
        &self,
        content: &Content,
        mode: PutMode,
    ) -> object_store::Result<Option<UpdateVersion>> {
        let text = serde_json::to_vec(content).map_err(|error| Error::Generic {
            store: "lease",
            source: Box::new(error),
        })?;
        match self
            .client
            .put_opts(&self.path, text.into(), mode.into())
            .await
        {
            Ok(PutResult { e_tag, version, .. }) => Ok(Some(UpdateVersion { e_tag, version })),
            // An earlier request of this process may have succeeded although it got no response.
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(self
                .read()
                .await?
                .and_then(|(version, found)| (found.token == content.token).then_some(version))),
            Err(error) => Err(error),
        }
    }

    /// The lease as it is; `None` if there never was one. Content that cannot be read counts as held.
    async fn read(&self) -> object_store::Result<Option<(UpdateVersion, Content)>> {
        let response = match self.client.get(&self.path).await {
            Ok(response) => response,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let (e_tag, version) = (response.meta.e_tag.clone(), response.meta.version.clone());
        let content = serde_json::from_slice(&response.bytes().await?).unwrap_or_default();
        Ok(Some((UpdateVersion { e_tag, version }, content)))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.stop.take());
        let Some(renewals) = self.renewals.take() else {
            return;
        };
        let release = async {
            if let Ok(Some((version, content))) = renewals.await {
                let content = Content {
                    is_released: true,
                    ..content
                };
                self.object.put(&content, PutMode::Update(version)).await?;
            }
            Ok(())
        };
        if let Err(error) = self.bucket.wait(&self.object.path, release) {
            tracing::warn!("{error}; the next job waits until the lease ends");
        }
    }
}
