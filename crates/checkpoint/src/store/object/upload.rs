//! Multipart uploads of files into a bucket.
//!
//! A few parts upload concurrently, which bounds the memory and keeps the network busy. The parts become
//! visible as an object only when the upload completes. A file of a single part is uploaded in one
//! request.

use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStoreExt as _};
use tokio::task::JoinSet;

use super::{Bucket, Writer};
use crate::Result;

/// The size of a part in bytes. S3 allows 10,000 parts, so a file has at most 335 GB.
const PART_BYTES: usize = 32 << 20;
/// The number of parts in flight, besides the one that is being filled.
const CONCURRENT_PARTS: usize = 4;
/// The time limit for aborting an unfinished upload.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);

/// A file that is being uploaded.
pub(super) struct Upload {
    bucket: Arc<Bucket>,
    path: Path,
    /// The part that is being filled.
    part: Vec<u8>,
    /// The multipart upload; `None` before the first part and after completion.
    multipart: Option<Box<dyn MultipartUpload>>,
    in_flight: JoinSet<object_store::Result<()>>,
}

impl Upload {
    pub(super) fn new(bucket: Arc<Bucket>, path: Path) -> Upload {
        Upload {
            bucket,
            path,
            part: Vec::new(),
            multipart: None,
            in_flight: JoinSet::new(),
        }
    }

    /// Uploads the filled part. Blocks while too many parts are in flight.
    fn send(&mut self) -> Result<()> {
        self.wait_for(CONCURRENT_PARTS - 1)?;
        let upload = match &mut self.multipart {
            Some(upload) => upload,
            none => {
                let client = &self.bucket.client;
                let upload = client.put_multipart(&self.path);
                none.insert(self.bucket.wait(&self.path, upload)?)
            }
        };
        let part = upload.put_part(std::mem::take(&mut self.part).into());
        self.in_flight.spawn_on(part, self.bucket.runtime.handle());
        Ok(())
    }

    /// Blocks until at most `max` parts are in flight.
    fn wait_for(&mut self, max: usize) -> Result<()> {
        while self.in_flight.len() > max {
            let next = self.in_flight.join_next();
            self.bucket.wait(&self.path, async {
                match next.await {
                    Some(sent) => sent?,
                    None => Ok(()),
                }
            })?;
        }
        Ok(())
    }
}

impl Writer for Upload {
    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            if self.part.is_empty() {
                self.part.reserve_exact(PART_BYTES);
            }
            let room = PART_BYTES - self.part.len();
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.part.extend_from_slice(now);
            if self.part.len() == PART_BYTES {
                self.send()?;
            }
            bytes = later;
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        if self.multipart.is_none() {
            let bytes = std::mem::take(&mut self.part);
            let client = &self.bucket.client;
            let put = client.put(&self.path, bytes.into());
            return self.bucket.wait(&self.path, put).map(drop);
        }
        if !self.part.is_empty() {
            self.send()?;
        }
        self.wait_for(0)?;
        if let Some(upload) = &mut self.multipart {
            self.bucket.wait(&self.path, upload.complete())?;
            self.multipart = None;
        }
        Ok(())
    }
}

impl Drop for Upload {
    /// Aborts an unfinished upload: a bucket keeps, and charges for, the parts of uploads that never complete.
    fn drop(&mut self) {
        let Some(mut upload) = self.multipart.take() else {
            return;
        };
        let in_flight = &mut self.in_flight;
        let aborted = self.bucket.runtime.block_on(async {
            in_flight.shutdown().await;
            tokio::time::timeout(ABORT_TIMEOUT, upload.abort()).await
        });
        if !matches!(aborted, Ok(Ok(()))) {
            tracing::warn!(
                "the unfinished upload of {} could not be aborted; its parts may remain in the bucket",
                self.bucket.describe(&self.path)
            );
        }
    }
}
