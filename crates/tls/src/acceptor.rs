//! Accepts TLS connections on asynchronous sockets, and limits their number and their handshakes.
//!
//! A client that does not know the run secret gets no further than the TLS handshake, which has a timeout. When too
//! many handshakes are in progress the oldest one is closed, so that idle clients cannot keep others out.

use std::collections::VecDeque;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// The delay after a failed accept, for example when the process is out of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(20);

/// The limits of a server.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The maximum number of authenticated connections.
    pub connections: usize,
    /// The maximum number of TLS handshakes in progress.
    pub handshakes: usize,
    /// The timeout of a TLS handshake.
    pub handshake_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 16_384,
            handshakes: 1024,
            handshake_timeout: Duration::from_secs(5),
        }
    }
}

/// Accepts the connections of a server.
#[derive(Debug)]
pub struct Acceptor {
    limits: Limits,
    connection_slots: Arc<Semaphore>,
    /// The connections whose handshake may be in progress, oldest first.
    handshakes: VecDeque<(AbortHandle, Arc<AtomicBool>)>,
    connections: JoinSet<()>,
}

/// The number of authenticated connections of a server.
#[derive(Clone, Debug)]
pub struct NumConnections {
    slots: Arc<Semaphore>,
    max: usize,
}

impl NumConnections {
    /// The number of connections now.
    pub fn get(&self) -> usize {
        self.max.saturating_sub(self.slots.available_permits())
    }
}

impl Acceptor {
    /// An acceptor without connections.
    pub fn new(limits: Limits) -> Acceptor {
        Acceptor {
            connection_slots: Arc::new(Semaphore::new(limits.connections)),
            limits,
            handshakes: VecDeque::new(),
            connections: JoinSet::new(),
        }
    }

    /// The number of authenticated connections, while the acceptor runs.
    pub fn num_connections(&self) -> NumConnections {
        NumConnections {
            slots: Arc::clone(&self.connection_slots),
            max: self.limits.connections,
        }
    }

    /// Accepts connections, and serves each one that has proven the run secret in a task of its own. Never returns;
    /// dropping the future closes all connections.
    pub async fn run<S, F>(mut self, listener: TcpListener, tls: Arc<ServerConfig>, serve: S)
    where
        S: Fn(TlsStream<TcpStream>, SocketAddr) -> F,
        F: Future<Output = ()> + Send + 'static,
        S: Clone + Send + 'static,
    {
        let tls = TlsAcceptor::from(tls);
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, from)) => self.admit(&tls, stream, from, serve.clone()),
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                    }
                },
                Some(_) = self.connections.join_next() => {}
            }
        }
    }

    fn admit<S, F>(&mut self, tls: &TlsAcceptor, stream: TcpStream, from: SocketAddr, serve: S)
    where
        S: Fn(TlsStream<TcpStream>, SocketAddr) -> F + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        self.limit_handshakes();
        let is_authenticated = Arc::new(AtomicBool::new(false));
        let handshake = Handshake {
            tls: tls.clone(),
            timeout: self.limits.handshake_timeout,
            is_authenticated: Arc::clone(&is_authenticated),
        };
        let slots = Arc::clone(&self.connection_slots);
        let task = self.connections.spawn(async move {
            let Some(stream) = handshake.perform(stream, from).await else {
                return;
            };
            let Ok(_slot) = slots.try_acquire() else {
                return tracing::warn!(%from, "rejected a connection: too many connections");
            };
            serve(stream, from).await;
        });
        self.handshakes.push_back((task, is_authenticated));
    }

    fn limit_handshakes(&mut self) {
        self.handshakes.retain(|(task, is_authenticated)| {
            !task.is_finished() && !is_authenticated.load(Relaxed)
        });
        if self.handshakes.len() >= self.limits.handshakes
            && let Some((oldest, _)) = self.handshakes.pop_front()
        {
            tracing::warn!("too many handshakes in progress: rejected the oldest connection");
            oldest.abort();
        }
    }
}

struct Handshake {
    tls: TlsAcceptor,
    timeout: Duration,
    is_authenticated: Arc<AtomicBool>,
}

impl Handshake {
    async fn perform(self, stream: TcpStream, from: SocketAddr) -> Option<TlsStream<TcpStream>> {
        let _ = stream.set_nodelay(true);
        match timeout(self.timeout, self.tls.accept(stream)).await {
            Ok(Ok(stream)) => {
                self.is_authenticated.store(true, Relaxed);
                Some(stream)
            }
            Ok(Err(error)) => {
                tracing::warn!(%from, %error, "rejected a connection: the client did not prove the run secret");
                None
            }
            Err(_) => {
                tracing::warn!(%from, "rejected a connection: the TLS handshake timed out");
                None
            }
        }
    }
}
