//! A server of messages over authenticated connections, with a thread per connection.

use std::fmt::{self, Debug, Display, Formatter};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustls::ServerConfig;

use crate::connection_limiter::{ConnectionLimiter, ConnectionPermit};
use crate::stream::{MessageProtocol, ServerStream};
use crate::{Identity, RunSecret, Service};

/// How long to wait when the system cannot accept another connection.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);
const STACK_BYTES: usize = 512 << 10;
/// This many rejections are logged one by one, later ones only when their number is a power of two.
const MAX_LOGGED_REJECTIONS: u64 = 16;

/// Serves one authenticated connection until it ends.
type Handler = dyn Fn(ServerStream, SocketAddr) + Send + Sync;

/// A running server. Dropping it stops it and closes its connections.
pub struct MessageServer {
    address: SocketAddr,
    state: Arc<ServerState>,
    accept_thread: Option<JoinHandle<()>>,
}

/// What the threads of a server share.
struct ServerState {
    tls: Arc<ServerConfig>,
    protocol: MessageProtocol,
    handler: Box<Handler>,
    limiter: Arc<ConnectionLimiter>,
    num_rejected: AtomicU64,
    is_stopped: AtomicBool,
}

impl MessageServer {
    /// Listens on `address`, a host and a port, and on no other interface; port 0 selects a free port. Every connection of a
    /// client that knows the secret is handed to `handler`, in a thread of its own.
    pub fn start(
        address: &str,
        (service, secret): (Service, &RunSecret),
        protocol: MessageProtocol,
        handler: impl Fn(ServerStream, SocketAddr) + Send + Sync + 'static,
    ) -> io::Result<MessageServer> {
        let identity = Identity::new(secret, service, "");
        let tls = identity.and_then(|identity| identity.server_config());
        let tls = tls.map_err(io::Error::other)?;
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let state = Arc::new(ServerState {
            tls,
            protocol,
            handler: Box::new(handler),
            limiter: Arc::default(),
            num_rejected: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
        });
        let thread = thread::Builder::new().name(protocol.server_name.to_owned());
        let accept_thread = thread.spawn({
            let state = Arc::clone(&state);
            move || state.accept_loop(&listener)
        })?;
        Ok(MessageServer {
            address,
            state,
            accept_thread: Some(accept_thread),
        })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
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

impl Drop for MessageServer {
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

impl Debug for MessageServer {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let name = self.state.protocol.server_name;
        write!(f, "MessageServer({name} at {})", self.address)
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
        let thread = thread::Builder::new().name("connection".to_owned());
        let spawned = thread
            .stack_size(STACK_BYTES)
            .spawn(move || state.serve_connection(stream, from, &permit));
        if let Err(error) = spawned {
            self.reject(from, &error);
        }
    }

    fn serve_connection(&self, stream: TcpStream, from: SocketAddr, permit: &ConnectionPermit) {
        let stream = match ServerStream::accept(stream, &self.tls, self.protocol) {
            Ok(_) if !permit.authenticate() => Err(too_many_connections()),
            accepted => accepted,
        };
        match stream {
            Ok(stream) => (self.handler)(stream, from),
            Err(error) => self.reject(from, &error),
        }
    }

    /// Counts a rejected connection, and logs it unless there were many.
    fn reject(&self, from: impl Display, error: &io::Error) {
        let number = 1 + self.num_rejected.fetch_add(1, Ordering::Relaxed);
        if number <= MAX_LOGGED_REJECTIONS || number.is_power_of_two() {
            let server = self.protocol.server_name;
            tracing::warn!("{server}: rejected {from} ({number} so far): {error}");
        }
    }
}

fn too_many_connections() -> io::Error {
    io::Error::other("there are too many connections")
}
