//! Accepts connections, and limits their number and their handshakes.
//!
//! A client that does not know the run secret gets no further than the TLS handshake, which has a timeout. When too
//! many handshakes are in progress the oldest one is closed, so that idle clients cannot keep agents out.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{Sender, channel};
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::server::{Grpc, StreamingService};
use tonic::{Code, Status, Streaming};
use trainyard_tls::{Identity, Service};

use super::codec::{Json, MAX_FRAME_BYTES, PROTOCOL_VERSION, SESSION_METHOD};
use super::coordinator_task::{CoordinatorTask, Inbound, RESPONSE_QUEUE, Traffic};
use super::record_file::RecordFile;
use crate::{RendezvousError, Request, Response, RunSecret};

/// The capacity of the queue of requests from all agents.
const REQUEST_QUEUE: usize = 4096;
/// The delay after a failed accept, for example when the process is out of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(20);

/// The limits of a server.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The maximum number of connected agents.
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

/// A running server. Dropping it stops the server.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    traffic: Arc<Traffic>,
    connection_slots: Arc<Semaphore>,
    max_connections: usize,
    coordinator: JoinHandle<Result<(), RendezvousError>>,
    acceptor: JoinHandle<()>,
}

/// Serves one run on this address and no other. Resumes from the record file if it exists.
pub async fn serve(
    address: SocketAddr,
    run: &str,
    secret: &RunSecret,
    record: &Path,
    limits: Limits,
) -> Result<Server, RendezvousError> {
    let failed = |error: &dyn std::error::Error| RendezvousError::Serve {
        address: address.to_string(),
        cause: error.to_string(),
    };
    crate::node_info::check_name("run", run)?;
    let tls = Identity::new(secret, Service::Rendezvous, run)
        .and_then(|identity| identity.server_config())
        .map_err(|error| failed(&error))?;
    let (record_file, run_state) = RecordFile::open(record, run)?;
    let listener = TcpListener::bind(address)
        .await
        .map_err(|error| failed(&error))?;
    let address = listener.local_addr().map_err(|error| failed(&error))?;
    let (requests, inbound) = channel(REQUEST_QUEUE);
    let traffic = Arc::new(Traffic::default());
    let max_connections = limits.connections;
    let connection_slots = Arc::new(Semaphore::new(max_connections));
    let acceptor = Acceptor {
        tls: TlsAcceptor::from(tls),
        connection_slots: Arc::clone(&connection_slots),
        limits,
        requests,
        handshakes: VecDeque::new(),
        connections: JoinSet::new(),
    };
    let coordinator = CoordinatorTask::new(run_state, record_file, Arc::clone(&traffic));
    Ok(Server {
        address,
        traffic,
        connection_slots,
        max_connections,
        coordinator: tokio::spawn(coordinator.run(inbound)),
        acceptor: tokio::spawn(acceptor.run(listener)),
    })
}

/// Serves one run until an error occurs, for programs that do nothing else. Calls `ready` with the address that the
/// server listens on.
pub fn serve_forever(
    address: SocketAddr,
    run: &str,
    secret: &RunSecret,
    record: &Path,
    limits: Limits,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), RendezvousError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| RendezvousError::Serve {
        address: address.to_string(),
        cause: error.to_string(),
    })?;
    runtime.block_on(async {
        let mut server = serve(address, run, secret, record, limits).await?;
        ready(server.address());
        server.run().await
    })
}

impl Server {
    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The number of connected agents.
    pub fn num_connected(&self) -> usize {
        self.max_connections
            .saturating_sub(self.connection_slots.available_permits())
    }

    /// The number of requests received so far, and of responses sent.
    pub fn traffic(&self) -> (u64, u64) {
        self.traffic.count()
    }

    /// Waits until the server cannot go on.
    pub async fn run(&mut self) -> Result<(), RendezvousError> {
        match (&mut self.coordinator).await {
            Ok(ended) => ended,
            Err(error) => Err(RendezvousError::Serve {
                address: self.address.to_string(),
                cause: error.to_string(),
            }),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.acceptor.abort();
        self.coordinator.abort();
    }
}

struct Acceptor {
    tls: TlsAcceptor,
    connection_slots: Arc<Semaphore>,
    limits: Limits,
    requests: Sender<Inbound>,
    /// The connections whose handshake may be in progress, oldest first.
    handshakes: VecDeque<(AbortHandle, Arc<Authenticated>)>,
    connections: JoinSet<()>,
}

/// Whether a connection has completed its handshake.
#[derive(Default)]
struct Authenticated(AtomicBool);

impl Acceptor {
    async fn run(mut self, listener: TcpListener) {
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, from)) => self.admit(stream, from),
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                    }
                },
                Some(_) = self.connections.join_next() => {}
            }
        }
    }

    fn admit(&mut self, stream: TcpStream, from: SocketAddr) {
        self.limit_handshakes();
        let authenticated = Arc::new(Authenticated::default());
        let handshake = Handshake {
            tls: self.tls.clone(),
            timeout: self.limits.handshake_timeout,
            authenticated: Arc::clone(&authenticated),
        };
        let requests = self.requests.clone();
        let slots = Arc::clone(&self.connection_slots);
        let task = self.connections.spawn(async move {
            let Some(stream) = handshake.perform(stream, from).await else {
                return;
            };
            let Ok(_slot) = slots.try_acquire() else {
                return tracing::warn!(%from, "rejected a connection: too many connections");
            };
            serve_connection(stream, requests).await;
        });
        self.handshakes.push_back((task, authenticated));
    }

    fn limit_handshakes(&mut self) {
        self.handshakes
            .retain(|(task, authenticated)| !task.is_finished() && !authenticated.0.load(Relaxed));
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
    authenticated: Arc<Authenticated>,
}

impl Handshake {
    async fn perform(self, stream: TcpStream, from: SocketAddr) -> Option<TlsStream<TcpStream>> {
        let _ = stream.set_nodelay(true);
        match timeout(self.timeout, self.tls.accept(stream)).await {
            Ok(Ok(stream)) => {
                self.authenticated.0.store(true, Relaxed);
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

/// Speaks HTTP/2 on a connection until it ends.
async fn serve_connection(stream: TlsStream<TcpStream>, requests: Sender<Inbound>) {
    let service = service_fn(move |request: http::Request<Incoming>| {
        let requests = requests.clone();
        async move {
            if request.uri().path() != SESSION_METHOD {
                let status = Status::unimplemented(format!(
                    "this server speaks protocol version {PROTOCOL_VERSION}, {SESSION_METHOD}"
                ));
                return Ok::<_, std::convert::Infallible>(status.into_http());
            }
            let codec = Json::<Response, Request>::default();
            let mut grpc = Grpc::new(codec).max_decoding_message_size(MAX_FRAME_BYTES);
            Ok(grpc.streaming(Session { requests }, request).await)
        }
    });
    let served = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(2)
        .max_frame_size(16 * 1024)
        .max_header_list_size(8 * 1024)
        .initial_stream_window_size(64 * 1024)
        .initial_connection_window_size(64 * 1024)
        .max_send_buf_size(64 * 1024)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a connection ended");
    }
}

/// The gRPC method of the server: the session of one agent.
struct Session {
    requests: Sender<Inbound>,
}

impl StreamingService<Request> for Session {
    type Response = Response;
    type ResponseStream = futures_util::stream::BoxStream<'static, Result<Response, Status>>;
    type Future = BoxFuture<'static, Result<tonic::Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: tonic::Request<Streaming<Request>>) -> Self::Future {
        let requests = self.requests.clone();
        Box::pin(async move {
            let (reply_to, responses) = channel(RESPONSE_QUEUE);
            tokio::spawn(forward(request.into_inner(), requests, reply_to));
            let responses: Self::ResponseStream = ReceiverStream::new(responses).map(Ok).boxed();
            Ok(tonic::Response::new(responses))
        })
    }
}

/// Forwards the requests of an agent until its stream ends. Its response stream then ends too, because the
/// coordinator drops its sender with the next broadcast.
async fn forward(
    mut stream: Streaming<Request>,
    requests: Sender<Inbound>,
    reply_to: Sender<Response>,
) {
    loop {
        let request = match stream.message().await {
            Ok(Some(request)) => request,
            Ok(None) => return,
            Err(status) if status.code() == Code::InvalidArgument => {
                return tracing::warn!(%status, "rejected a connection: invalid request");
            }
            Err(status) => return tracing::debug!(%status, "the stream of an agent broke"),
        };
        let reply_to = reply_to.clone();
        if requests.send(Inbound { request, reply_to }).await.is_err() {
            return;
        }
    }
}
