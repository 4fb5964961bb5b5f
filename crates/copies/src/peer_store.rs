//! The memory of peers as a store of checkpoints.
//!
//! Files go to two holders, this host's and its partner's; the manifest, which makes a checkpoint of
//! them, goes to all, because any host may be the one that is left. Whoever cannot be reached is
//! passed over: a file counts when one holder has it, and reading fails only when nobody does. What is
//! read is checked by the digests of its checkpoint, as from any other store.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use trainyard_checkpoint::store::Sink;
use trainyard_checkpoint::{CheckpointError, Result, Store};

use crate::peer::{Peer, Upload};
use crate::wire::{CHUNK, LONGEST_PATH, Reply, Request};
use crate::{Neighbourhood, Secret};

/// The holders of a run, from one host.
#[derive(Debug)]
pub struct PeerStore {
    /// In the order of hosts.
    peers: Vec<Peer>,
    keepers: Vec<usize>,
    by_nearness: Vec<usize>,
    /// Who had a file when it was last read.
    found: Mutex<HashMap<String, usize>>,
}

impl PeerStore {
    /// Reaches the holders when they are needed.
    pub fn new(neighbourhood: Neighbourhood, secret: Secret) -> PeerStore {
        let addresses = neighbourhood.holders().iter();
        PeerStore {
            peers: addresses
                .map(|address| Peer::new(address.clone(), secret.clone()))
                .collect(),
            keepers: neighbourhood.keepers(),
            by_nearness: neighbourhood.by_nearness(),
            found: Mutex::default(),
        }
    }

    /// Begins a file with some holders, at least one of which must be there.
    fn upload(&self, path: &str, hosts: &[usize]) -> Result<Copies> {
        let described = self.describe(path);
        if path.len() > LONGEST_PATH {
            let reason = io::Error::new(ErrorKind::InvalidInput, "the path is too long");
            return Err(refused(&described)(reason));
        }
        let mut uploads = Vec::new();
        let mut failure = nobody();
        for &host in hosts {
            match self.peers[host].begin(path) {
                Ok(upload) => uploads.push(upload),
                Err(error) => failure = error,
            }
        }
        match uploads.is_empty() {
            true => Err(refused(&described)(failure)),
            false => Ok(Copies {
                path: described,
                uploads,
                waiting: Vec::new(),
            }),
        }
    }

    /// Asks everybody; what those said who answered, of whom there must be one.
    fn ask_all<T>(
        &self,
        path: &str,
        request: Request<'_>,
        take: impl Fn(Reply<'_>) -> Option<T>,
    ) -> Result<Vec<T>> {
        let mut answers = Vec::new();
        let mut failure = nobody();
        for &host in &self.by_nearness {
            match self.peers[host].ask(request, &take) {
                Ok(answer) => answers.push(answer),
                Err(error) => failure = error,
            }
        }
        match answers.is_empty() {
            true => Err(refused(&self.describe(path))(failure)),
            false => Ok(answers),
        }
    }

    /// A part of a file, at most a chunk, from the first who has it.
    fn chunk(&self, path: &str, start: u64, length: u64) -> io::Result<Vec<u8>> {
        let last = self.found().get(path).copied();
        let mut failure = io::Error::new(ErrorKind::NotFound, "no holder has it");
        let request = Request::Read {
            path,
            start,
            length,
        };
        for &host in last.iter().chain(&self.by_nearness) {
            match self.peers[host].ask(request, bytes_or_none) {
                Ok(Some(bytes)) if bytes.len() as u64 == length => {
                    self.found().insert(path.to_owned(), host);
                    return Ok(bytes);
                }
                Ok(Some(_)) => failure = ErrorKind::UnexpectedEof.into(),
                Ok(None) => {}
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    fn found(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for PeerStore {
    fn describe(&self, path: &str) -> String {
        format!("{path} in peers' memory")
    }

    fn create(&self, path: &str) -> Result<Box<dyn Sink>> {
        Ok(Box::new(self.upload(path, &self.keepers)?))
    }

    fn put(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let mut copies = self.upload(path, &self.by_nearness)?;
        copies.write(bytes)?;
        Box::new(copies).finish()
    }

    fn size(&self, path: &str) -> Result<Option<u64>> {
        let sizes = self.ask_all(path, Request::Size { path }, |reply| match reply {
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
            let length = (range.end - start).min(CHUNK as u64);
            let chunk = self.chunk(path, start, length);
            bytes.extend(chunk.map_err(refused(&self.describe(path)))?);
            start += length;
        }
        Ok(bytes)
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let lists = self.ask_all(folder, Request::List { folder }, |reply| match reply {
            Reply::Names(names) => Some(names.into_iter().map(str::to_owned).collect::<Vec<_>>()),
            _ => None,
        })?;
        let names: BTreeSet<String> = lists.into_iter().flatten().collect();
        Ok(names.into_iter().collect())
    }

    fn remove(&self, path: &str) -> Result<()> {
        self.ask_all(path, Request::Remove { path }, done)?;
        Ok(())
    }

    fn remove_folder(&self, folder: &str) -> Result<()> {
        self.ask_all(folder, Request::RemoveFolder { folder }, done)?;
        Ok(())
    }
}

/// A file on its way to several holders.
struct Copies {
    path: String,
    uploads: Vec<Upload>,
    /// Less than a chunk, not sent yet: many small tensors go in one message.
    waiting: Vec<u8>,
}

impl Copies {
    fn send_waiting(&mut self) -> Result<()> {
        let waiting = std::mem::take(&mut self.waiting);
        self.keep(|upload| upload.append(&waiting))?;
        self.waiting = waiting;
        self.waiting.clear();
        Ok(())
    }

    /// Goes on with those with whom it works, of whom there must be one.
    fn keep(&mut self, mut act: impl FnMut(&mut Upload) -> io::Result<()>) -> Result<()> {
        let mut failure = nobody();
        let path = &self.path;
        self.uploads.retain_mut(|upload| match act(upload) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!("no copy of {path} at {}: {error}", upload.address);
                failure = error;
                false
            }
        });
        match self.uploads.is_empty() {
            true => Err(refused(path)(failure)),
            false => Ok(()),
        }
    }
}

impl Sink for Copies {
    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let room = CHUNK - self.waiting.len();
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.waiting.extend_from_slice(now);
            if self.waiting.len() == CHUNK {
                self.send_waiting()?;
            }
            bytes = later;
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.send_waiting()?;
        self.keep(Upload::end)?;
        let mut failure = nobody();
        let mut num_copies = 0;
        for upload in self.uploads {
            let address = upload.address.clone();
            match upload.confirm() {
                Ok(()) => num_copies += 1,
                Err(error) => {
                    tracing::warn!("no copy of {} at {address}: {error}", self.path);
                    failure = error;
                }
            }
        }
        match num_copies {
            0 => Err(refused(&self.path)(failure)),
            _ => Ok(()),
        }
    }
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

fn nobody() -> io::Error {
    io::Error::new(ErrorKind::NotConnected, "no holder can be reached")
}

fn refused(path: &str) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Io { path, source }
}
