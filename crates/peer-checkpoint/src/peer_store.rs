//! The memory of peers as a checkpoint store.
//!
//! A node writes its files to two replica servers, its own and its buddy's. The manifest, which makes a checkpoint of
//! the files, goes to all servers, because any node may be the one that survives. Servers that cannot be reached are
//! skipped: a write succeeds if one server has the file, and a read fails only if no server has it. Readers verify
//! the digests in the manifest, as with any other store.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use trainyard_checkpoint::store::Writer;
use trainyard_checkpoint::{CheckpointError, Result, Store};
use trainyard_tls::{Identity, RunSecret, Service, TlsError};

use crate::ReplicaPlacement;
use crate::peer::{Peer, Upload};
use crate::wire::{CHUNK_BYTES, MAX_PATH_BYTES, Reply, Request};

/// A store in the memory of a run's replica servers, as one node uses it.
#[derive(Debug)]
pub struct PeerStore {
    /// In the order of nodes.
    peers: Vec<Peer>,
    targets: Vec<usize>,
    lookup_order: Vec<usize>,
    /// The node that had a file when it was last read.
    locations: Mutex<HashMap<String, usize>>,
}

impl PeerStore {
    /// Prepares the store; it connects to a replica server when it first needs it.
    pub fn new(placement: &ReplicaPlacement, secret: &RunSecret) -> Result<PeerStore, TlsError> {
        let tls = Identity::new(secret, Service::PeerCheckpoint, "")?.client_config()?;
        let addresses = placement.servers().iter();
        Ok(PeerStore {
            peers: addresses
                .map(|address| Peer::new(address.clone(), Arc::clone(&tls)))
                .collect(),
            targets: placement.targets(),
            lookup_order: placement.lookup_order(),
            locations: Mutex::default(),
        })
    }

    /// Starts a file on the servers of some nodes, at least one of which must be reachable.
    fn start_upload(&self, path: &str, nodes: &[usize]) -> Result<ReplicatedWriter> {
        let description = self.describe(path);
        if path.len() > MAX_PATH_BYTES {
            let reason = io::Error::new(ErrorKind::InvalidInput, "the path is too long");
            return Err(failed(&description)(reason));
        }
        let mut uploads = Vec::new();
        let mut last_error = unreachable();
        for &node in nodes {
            match self.peers[node].start_upload(path) {
                Ok(upload) => uploads.push(upload),
                Err(error) => last_error = error,
            }
        }
        if uploads.is_empty() {
            Err(failed(&description)(last_error))
        } else {
            Ok(ReplicatedWriter {
                path: description,
                uploads,
                buffer: Vec::new(),
            })
        }
    }

    /// Sends a request to all servers; the replies of those that answer, of which there must be one.
    fn request_all<T>(
        &self,
        path: &str,
        request: Request<'_>,
        extract: impl Fn(Reply<'_>) -> Option<T>,
    ) -> Result<Vec<T>> {
        let mut replies = Vec::new();
        let mut last_error = unreachable();
        for &node in &self.lookup_order {
            match self.peers[node].request(request, &extract) {
                Ok(reply) => replies.push(reply),
                Err(error) => last_error = error,
            }
        }
        if replies.is_empty() {
            Err(failed(&self.describe(path))(last_error))
        } else {
            Ok(replies)
        }
    }

    /// Reads a range of a file, at most one chunk, from the first server that has it.
    fn read_chunk(&self, path: &str, start: u64, length: u64) -> io::Result<Vec<u8>> {
        let last_location = self.locations().get(path).copied();
        let mut last_error = io::Error::new(ErrorKind::NotFound, "no replica server has it");
        let request = Request::Read {
            path,
            start,
            length,
        };
        for &node in last_location.iter().chain(&self.lookup_order) {
            match self.peers[node].request(request, bytes_or_none) {
                Ok(Some(bytes)) if bytes.len() as u64 == length => {
                    self.locations().insert(path.to_owned(), node);
                    return Ok(bytes);
                }
                Ok(Some(_)) => last_error = ErrorKind::UnexpectedEof.into(),
                Ok(None) => {}
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }

    fn locations(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.locations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for PeerStore {
    fn describe(&self, path: &str) -> String {
        format!("{path} in peer memory")
    }

    fn create(&self, path: &str) -> Result<Box<dyn Writer>> {
        Ok(Box::new(self.start_upload(path, &self.targets)?))
    }

    fn put(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let mut writer = self.start_upload(path, &self.lookup_order)?;
        writer.write(bytes)?;
        Box::new(writer).finish()
    }

    fn size(&self, path: &str) -> Result<Option<u64>> {
        let sizes = self.request_all(path, Request::Size { path }, |reply| match reply {
            Reply::Size(size) => Some(Some(size)),
            Reply::Missing => Some(None),
            _ => None,
        })?;
        Ok(sizes.into_iter().flatten().next())
    }

    fn read(&self, path: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut start = range.start;
        while start < range.end {
            let length = (range.end - start).min(CHUNK_BYTES as u64);
            let chunk = self.read_chunk(path, start, length);
            bytes.extend(chunk.map_err(failed(&self.describe(path)))?);
            start += length;
        }
        Ok(bytes)
    }

    fn list(&self, dir: &str) -> Result<Vec<String>> {
        let lists = self.request_all(dir, Request::List { dir }, |reply| match reply {
            Reply::Names(names) => Some(names.into_iter().map(str::to_owned).collect::<Vec<_>>()),
            _ => None,
        })?;
        let names: BTreeSet<String> = lists.into_iter().flatten().collect();
        Ok(names.into_iter().collect())
    }

    fn remove(&self, path: &str) -> Result<()> {
        self.request_all(path, Request::Remove { path }, done)?;
        Ok(())
    }

    fn remove_dir(&self, dir: &str) -> Result<()> {
        self.request_all(dir, Request::RemoveDir { dir }, done)?;
        Ok(())
    }
}

/// Writes one file to several replica servers.
struct ReplicatedWriter {
    path: String,
    uploads: Vec<Upload>,
    /// Less than a chunk that is not sent yet, so that many small tensors share a message.
    buffer: Vec<u8>,
}

impl ReplicatedWriter {
    fn send_buffer(&mut self) -> Result<()> {
        let buffer = std::mem::take(&mut self.buffer);
        self.for_each_upload(|upload| upload.append(&buffer))?;
        self.buffer = buffer;
        self.buffer.clear();
        Ok(())
    }

    /// Calls `act` for every upload and drops those for which it fails. One must remain.
    fn for_each_upload(
        &mut self,
        mut act: impl FnMut(&mut Upload) -> io::Result<()>,
    ) -> Result<()> {
        let mut last_error = unreachable();
        let path = &self.path;
        self.uploads.retain_mut(|upload| match act(upload) {
            Ok(()) => true,
            Err(error) => {
                warn_lost_replica(path, &upload.address, &error);
                last_error = error;
                false
            }
        });
        if self.uploads.is_empty() {
            Err(failed(path)(last_error))
        } else {
            Ok(())
        }
    }
}

impl Writer for ReplicatedWriter {
    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let room = CHUNK_BYTES - self.buffer.len();
            let (head, rest) = bytes.split_at(bytes.len().min(room));
            self.buffer.extend_from_slice(head);
            if self.buffer.len() == CHUNK_BYTES {
                self.send_buffer()?;
            }
            bytes = rest;
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.send_buffer()?;
        self.for_each_upload(Upload::finish)?;
        let mut last_error = unreachable();
        let mut num_replicas = 0;
        for upload in self.uploads {
            let address = upload.address.clone();
            match upload.confirm() {
                Ok(()) => num_replicas += 1,
                Err(error) => {
                    warn_lost_replica(&self.path, &address, &error);
                    last_error = error;
                }
            }
        }
        match num_replicas {
            0 => Err(failed(&self.path)(last_error)),
            _ => Ok(()),
        }
    }
}

fn warn_lost_replica(path: &str, address: &str, error: &io::Error) {
    tracing::warn!("cannot keep a replica of {path} at {address}: {error}");
}

fn bytes_or_none(reply: Reply<'_>) -> Option<Option<Vec<u8>>> {
    match reply {
        Reply::Bytes(bytes) => Some(Some(bytes.to_owned())),
        Reply::Missing => Some(None),
        _ => None,
    }
}

fn done(reply: Reply<'_>) -> Option<()> {
    (reply == Reply::Done).then_some(())
}

fn unreachable() -> io::Error {
    io::Error::new(ErrorKind::NotConnected, "no replica server can be reached")
}

fn failed(path: &str) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Io { path, source }
}
