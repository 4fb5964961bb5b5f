//! A file on its way into a bucket.
//!
//! It goes in parts, a few at a time, so that memory is bounded and the line is kept busy. The server
//! keeps the parts to itself until it is told that they are a file, so nobody sees one that is not whole.
//! A file of a single part is put in one request.

use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStoreExt as _};
use tokio::task::JoinSet;

use super::{Bucket, Sink};
use crate::Result;

/// Bytes of a part. Servers take 10 000 of them, so a file has up to 335 GB.
const PART: usize = 32 << 20;
/// Parts under way at once, beside the one that is being filled.
const PARTS_AT_ONCE: usize = 4;
/// How long a file that is given up is worth tidying up after.
const TIDYING: Duration = Duration::from_secs(10);

pub(super) struct Upload {
    bucket: Arc<Bucket>,
    path: Path,
    /// The part that is being filled.
    part: Vec<u8>,
    /// What the server knows of; none before the first part, and after the last.
    begun: Option<Box<dyn MultipartUpload>>,
    under_way: JoinSet<object_store::Result<()>>,
}

impl Upload {
    pub(super) fn new(bucket: Arc<Bucket>, path: Path) -> Upload {
        Upload {
            bucket,
            path,
            part: Vec::new(),
            begun: None,
            under_way: JoinSet::new(),
        }
    }

    /// Sends the part that was filled, as soon as there is room for it.
    fn send(&mut self) -> Result<()> {
        self.wait_for(PARTS_AT_ONCE - 1)?;
        let upload = match &mut self.begun {
            Some(upload) => upload,
            none => {
                let client = &self.bucket.client;
                let begun = self
                    .bucket
                    .wait(&self.path, client.put_multipart(&self.path))?;
                none.insert(begun)
            }
        };
        let part = upload.put_part(std::mem::take(&mut self.part).into());
        self.under_way.spawn_on(part, self.bucket.runtime.handle());
        Ok(())
    }

    /// Waits until no more parts than `most` are under way.
    fn wait_for(&mut self, most: usize) -> Result<()> {
        while self.under_way.len() > most {
            let next = self.under_way.join_next();
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

impl Sink for Upload {
    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            if self.part.is_empty() {
                self.part.reserve_exact(PART);
            }
            let room = PART - self.part.len();
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.part.extend_from_slice(now);
            if self.part.len() == PART {
                self.send()?;
            }
            bytes = later;
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        if self.begun.is_none() {
            let whole = std::mem::take(&mut self.part);
            let client = &self.bucket.client;
            let put = client.put(&self.path, whole.into());
            return self.bucket.wait(&self.path, put).map(drop);
        }
        if !self.part.is_empty() {
            self.send()?;
        }
        self.wait_for(0)?;
        if let Some(upload) = &mut self.begun {
            self.bucket.wait(&self.path, upload.complete())?;
            self.begun = None;
        }
        Ok(())
    }
}

impl Drop for Upload {
    /// Parts that become no file are deleted, or the bucket's owner pays for them.
    fn drop(&mut self) {
        let Some(mut upload) = self.begun.take() else {
            return;
        };
        let under_way = &mut self.under_way;
        let tidied = self.bucket.runtime.block_on(async {
            under_way.shutdown().await;
            tokio::time::timeout(TIDYING, upload.abort()).await
        });
        if !matches!(tidied, Ok(Ok(()))) {
            tracing::warn!(
                "parts of {} may be left in the bucket",
                self.bucket.describe(&self.path)
            );
        }
    }
}
