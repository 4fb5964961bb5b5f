//! Serves one run: accepts the agents that know its secret, and passes their requests to the coordinator.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Sender, channel};
use tokio::task::JoinHandle;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::server::{Grpc, StreamingService};
use tonic::{Code, Status, Streaming};
use trainyard_tls::{Acceptor, Identity, Limits, NumConnections, Service};

use super::codec::{Json, MAX_FRAME_BYTES, PROTOCOL_VERSION, SESSION_METHOD};
use super::coordinator_task::{CoordinatorTask, Inbound, RESPONSE_QUEUE, Traffic};
use super::record_file::RecordFile;
use crate::{RendezvousError, Request, Response, RunSecret};

/// The capacity of the queue of requests from all agents.
const REQUEST_QUEUE: usize = 4096;

/// A running server. Dropping it stops the server.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    traffic: Arc<Traffic>,
    num_connections: NumConnections,
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
    let acceptor = Acceptor::new(limits);
    let num_connections = acceptor.num_connections();
    let connections = acceptor.run(listener, tls, move |stream, _| {
        serve_connection(stream, requests.clone())
    });
    let coordinator = CoordinatorTask::new(run_state, record_file, Arc::clone(&traffic));
    Ok(Server {
        address,
        traffic,
        num_connections,
        coordinator: tokio::spawn(coordinator.run(inbound)),
        acceptor: tokio::spawn(connections),
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
        self.num_connections.get()
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
