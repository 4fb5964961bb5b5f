//! The replica server: keeps files in memory for the processes of a run.
//!
//! It outlives the workers, as a thread of the launcher or as a process of its own, so what they saved is still there
//! when they restart. A thread serves each connection. A file becomes visible when it is complete; if a connection
//! ends before that, the server discards the file.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustls::ServerConfig;
use trainyard_tls::{Identity, RunSecret, Service};

use crate::connection_limiter::{ConnectionLimiter, ConnectionPermit};
use crate::memory_store::{CapacityError, MemoryStore, PartialFile};
use crate::stream::ServerStream;
use crate::wire::{CHUNK_BYTES, MAX_MESSAGE_BYTES, Malformed, Reply, Request};

/// How long a client may be idle; it reconnects when it needs to.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// How long to wait when the system cannot accept another connection.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);
const STACK_BYTES: usize = 512 << 10;
/// This many rejections are logged one by one, later ones only when their number is a power of two.
const MAX_LOGGED_REJECTIONS: u64 = 16;

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
    address: SocketAddr,
    state: Arc<ServerState>,
    accept_thread: Option<JoinHandle<()>>,
}

/// What the threads of a replica server share.
#[derive(Debug)]
struct ServerState {
    tls: Arc<ServerConfig>,
    store: Arc<MemoryStore>,
    limiter: Arc<ConnectionLimiter>,
    num_rejected: AtomicU64,
    is_stopped: AtomicBool,
}

impl ReplicaServer {
    /// Listens on `address`, a host and a port, and on no other interface; port 0 selects a free port. The server
    /// keeps at most `capacity` bytes.
    pub fn start(
        address: &str,
        capacity: u64,
        secret: &RunSecret,
    ) -> Result<ReplicaServer, ReplicaServerError> {
        let failed = |source| ReplicaServerError {
            address: address.to_owned(),
            source,
        };
        let identity = Identity::new(secret, Service::PeerCheckpoint, "");
        let tls = identity.and_then(|identity| identity.server_config());
        let tls = tls.map_err(|error| failed(io::Error::other(error)))?;
        let listener = TcpListener::bind(address).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let state = Arc::new(ServerState {
            tls,
            store: Arc::new(MemoryStore::new(capacity)),
            limiter: Arc::default(),
            num_rejected: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
        });
        let thread = thread::Builder::new().name("replica server".to_owned());
        let accept_thread = thread.spawn({
            let state = Arc::clone(&state);
            move || state.accept_loop(&listener)
        });
        Ok(ReplicaServer {
            address: bound,
            state,
            accept_thread: Some(accept_thread.map_err(failed)?),
        })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many bytes it keeps, complete files and partial ones.
    pub fn num_bytes(&self) -> u64 {
        self.state.store.num_bytes()
    }

    /// How many connections it has rejected.
    pub fn num_rejected(&self) -> u64 {
        self.state.num_rejected.load(Ordering::Relaxed)
    }

    /// Serves for as long as the process lives.
    pub fn serve_forever(mut self) {
        if let Some(thread) = self.accept_thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for ReplicaServer {
    fn drop(&mut self) {
        self.state.is_stopped.store(true, Ordering::Relaxed);
        self.state.limiter.close();
        // Wakes the thread that accepts, so that it sees the flag.
        let is_woken = TcpStream::connect_timeout(&self.address, Duration::from_secs(1)).is_ok();
        if let Some(thread) = self.accept_thread.take().filter(|_| is_woken) {
            let _ = thread.join();
        }
    }
}

impl ServerState {
    fn accept_loop(self: &Arc<ServerState>, listener: &TcpListener) {
        loop {
            let accepted = listener.accept();
            if self.is_stopped.load(Ordering::Relaxed) {
                return;
            }
            match accepted {
                Ok((stream, from)) => self.accept(stream, from),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    self.reject("a connection", &error);
                    thread::sleep(ACCEPT_RETRY_DELAY);
                }
            }
        }
    }

    fn accept(self: &Arc<ServerState>, stream: TcpStream, from: SocketAddr) {
        let Some(permit) = self.limiter.admit(&stream) else {
            return self.reject(from, &too_many_connections());
        };
        let state = Arc::clone(self);
        let thread = thread::Builder::new().name("replica connection".to_owned());
        let spawned = thread
            .stack_size(STACK_BYTES)
            .spawn(move || state.serve_connection(stream, from, &permit));
        if let Err(error) = spawned {
            self.reject(from, &error);
        }
    }

    fn serve_connection(&self, stream: TcpStream, from: SocketAddr, permit: &ConnectionPermit) {
        let stream = match ServerStream::accept(stream, &self.tls) {
            Ok(_) if !permit.authenticate() => Err(too_many_connections()),
            accepted => accepted,
        };
        match stream {
            Ok(stream) => self.serve(stream, from),
            Err(error) => self.reject(from, &error),
        }
    }

    /// Answers requests until the client disconnects or its idle time is over.
    fn serve(&self, mut stream: ServerStream, from: SocketAddr) {
        let mut connection = Connection::new(&self.store);
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

    /// Counts a rejected connection, and logs it unless there were many.
    fn reject(&self, from: impl Display, error: &io::Error) {
        let number = 1 + self.num_rejected.fetch_add(1, Ordering::Relaxed);
        if number <= MAX_LOGGED_REJECTIONS || number.is_power_of_two() {
            tracing::warn!("replica server: rejected {from} ({number} so far): {error}");
        }
    }
}

fn too_many_connections() -> io::Error {
    io::Error::other("there are too many connections")
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
