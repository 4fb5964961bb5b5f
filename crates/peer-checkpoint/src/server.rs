//! The replica server: keeps files in memory for the processes of a run.
//!
//! It outlives the workers, as a thread of the launcher or as a process of its own, so what they saved is still there
//! when they restart. A thread serves each connection. A file becomes visible when it is complete; if a connection
//! ends before that, the server discards the file.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use trainyard_tls::{MessageServer, RunSecret, ServerStream, Service};

use crate::memory_store::{CapacityError, MemoryStore, PartialFile};
use crate::wire::{CHUNK_BYTES, MAX_MESSAGE_BYTES, Malformed, PROTOCOL, Reply, Request};

/// How long a client may be idle; it reconnects when it needs to.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);

/// A replica server cannot start.
#[derive(Debug, thiserror::Error)]
#[error("cannot start a replica server at {address}: {source}")]
pub struct ReplicaServerError {
    /// The address it was to listen on.
    pub address: String,
    /// Why it cannot.
    pub source: io::Error,
}

/// A running replica server. Dropping it stops it and frees everything it keeps.
#[derive(Debug)]
pub struct ReplicaServer {
    server: MessageServer,
    store: Arc<MemoryStore>,
}

impl ReplicaServer {
    /// Listens on `address`, a host and a port, and on no other interface; port 0 selects a free port. The server
    /// keeps at most `capacity` bytes.
    pub fn start(
        address: &str,
        capacity: u64,
        secret: &RunSecret,
    ) -> Result<ReplicaServer, ReplicaServerError> {
        let store = Arc::new(MemoryStore::new(capacity));
        let server = MessageServer::start(address, (Service::PeerCheckpoint, secret), PROTOCOL, {
            let store = Arc::clone(&store);
            move |stream, from| serve(&store, stream, from)
        });
        let server = server.map_err(|source| ReplicaServerError {
            address: address.to_owned(),
            source,
        })?;
        Ok(ReplicaServer { server, store })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// How many bytes it keeps, complete files and partial ones.
    pub fn num_bytes(&self) -> u64 {
        self.store.num_bytes()
    }

    /// How many connections it has rejected.
    pub fn num_rejected(&self) -> u64 {
        self.server.num_rejected()
    }

    /// Serves for as long as the process lives.
    pub fn serve_forever(self) {
        self.server.serve_forever();
    }
}

/// Answers requests until the client disconnects or its idle time is over.
fn serve(store: &Arc<MemoryStore>, mut stream: ServerStream, from: SocketAddr) {
    let mut connection = Connection::new(store);
    loop {
        let message = match stream.receive_within(IDLE_TIMEOUT) {
            Ok(message) => message,
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                return tracing::warn!("replica server: disconnected {from}: {error}");
            }
            Err(_) => return,
        };
        match connection.receive(&message) {
            Ok(None) => {}
            Ok(Some(reply)) if stream.send(&reply).is_ok() => {}
            Ok(Some(_)) => return,
            Err(error) => {
                return tracing::warn!("replica server: disconnected {from}: {error}");
            }
        }
    }
}

/// Handles the requests of one client.
struct Connection<'a> {
    store: &'a Arc<MemoryStore>,
    /// The file that the client is writing. Once it exceeds the capacity, the rest of it is ignored.
    file: Option<Result<PartialFile, CapacityError>>,
}

impl<'a> Connection<'a> {
    fn new(store: &'a Arc<MemoryStore>) -> Connection<'a> {
        Connection { store, file: None }
    }

    /// Decodes and executes a request; the encoded reply, if the request has one.
    fn receive(&mut self, message: &[u8]) -> Result<Option<Vec<u8>>, Malformed> {
        Ok(self.handle(Request::decode(message)?))
    }

    fn handle(&mut self, request: Request<'_>) -> Option<Vec<u8>> {
        let store = self.store;
        let reply = match request {
            Request::Create { path } => {
                // Frees the memory of an unfinished file before the next one takes any.
                self.file = None;
                self.file = Some(store.create(path));
                return None;
            }
            Request::Append { bytes } => {
                self.append(bytes);
                return None;
            }
            Request::Finish => return Some(self.finish()),
            Request::Size { path } => store
                .size(path)
                .map_or(Reply::Missing, Reply::Size)
                .encode(),
            Request::Read {
                path,
                start,
                length,
            } => {
                let length = length.min(CHUNK_BYTES as u64) as usize;
                let bytes = store.read(path, start, length);
                let bytes = bytes.as_deref();
                bytes.map_or(Reply::Missing, Reply::Bytes).encode()
            }
            Request::List { dir } => names(&store.list(dir)),
            Request::Remove { path } => {
                store.remove(path);
                Reply::Done.encode()
            }
            Request::RemoveDir { dir } => {
                store.remove_dir(dir);
                Reply::Done.encode()
            }
        };
        Some(reply)
    }

    fn append(&mut self, bytes: &[u8]) {
        if let Some(Ok(file)) = &mut self.file
            && let Err(error) = file.append(bytes)
        {
            self.file = Some(Err(error));
        }
    }

    fn finish(&mut self) -> Vec<u8> {
        match self.file.take() {
            Some(Ok(file)) => {
                file.finish();
                Reply::Done.encode()
            }
            Some(Err(error)) => Reply::Rejected(&error.to_string()).encode(),
            None => Reply::Rejected("this connection has not created a file").encode(),
        }
    }
}

/// What a server without files replies to the messages of one client, up to the first malformed one. For fuzzing.
#[doc(hidden)]
pub fn replies<'a>(messages: impl Iterator<Item = &'a [u8]>, capacity: u64) -> Vec<Vec<u8>> {
    let store = Arc::new(MemoryStore::new(capacity));
    let mut connection = Connection::new(&store);
    let received = messages.map_while(|message| connection.receive(message).ok());
    received.flatten().collect()
}

fn names(names: &BTreeSet<String>) -> Vec<u8> {
    let reply = Reply::Names(names.iter().map(String::as_str).collect()).encode();
    if reply.len() <= MAX_MESSAGE_BYTES {
        reply
    } else {
        Reply::Rejected("the directory has too many entries").encode()
    }
}
