//! The session of an agent over a server.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};
use trainyard_tls::{Identity, Service};

use super::codec::{Json, MAX_FRAME_BYTES, PROTOCOL_VERSION, SESSION_METHOD};
use crate::membership::spawn_session;
use crate::session::{SessionConfig, SessionError, Transport};
use crate::{
    Address, Backend, ClientSession, Epoch, Join, LeaseTracker, Membership, RendezvousError,
    Report, Request, Response, RunSecret,
};

/// The capacity of the queue of requests that wait for the network.
const REQUEST_QUEUE: usize = 64;
/// Short, because only the next attempt notices that the network has recovered.
const TCP_TIMEOUT: Duration = Duration::from_secs(1);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// A rendezvous server, as an agent reaches it.
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: Arc<Endpoint>,
}

#[derive(Debug)]
struct Endpoint {
    address: Address,
    tls: Arc<ClientConfig>,
}

impl Client {
    /// A client of the server of a run. Does not connect yet.
    pub fn new(address: Address, run: &str, secret: &RunSecret) -> Result<Client, RendezvousError> {
        let tls = Identity::new(secret, Service::Rendezvous, run)
            .and_then(|identity| identity.client_config())
            .map_err(|error| RendezvousError::Unreachable {
                endpoint: address.to_string(),
                cause: error.to_string(),
            })?;
        Ok(Client {
            endpoint: Arc::new(Endpoint { address, tls }),
        })
    }

    /// Opens an authenticated connection and sends nothing on it, for programs that test the server with messages of
    /// their own.
    pub async fn connect(&self) -> io::Result<TlsStream<TcpStream>> {
        connect(&self.endpoint.address, &self.endpoint.tls).await
    }
}

#[async_trait]
impl Backend for Client {
    async fn join(&self, join: Join) -> Result<Arc<dyn Membership>, RendezvousError> {
        let config = SessionConfig::new(self.endpoint.address.to_string(), &join);
        let session = ServerSession {
            endpoint: Arc::clone(&self.endpoint),
            heartbeat: join.policy.heartbeat(),
            silence_timeout: join.policy.lease.max(CONNECT_TIMEOUT),
            session: ClientSession::new(join),
            started: config.started,
            connection: None,
            last_received: config.started,
            rejoin_at: config.started,
        };
        spawn_session(config, session).await
    }
}

/// Exchanges the messages of a [`ClientSession`] with the server.
struct ServerSession {
    endpoint: Arc<Endpoint>,
    session: ClientSession,
    heartbeat: Duration,
    /// How long a connection may be silent before it is closed. A network partition drops packets without notice, and
    /// TCP would report it only minutes after the network has recovered.
    silence_timeout: Duration,
    started: Instant,
    connection: Option<Connection>,
    last_received: Instant,
    /// When to send the next join, unless the last one was acknowledged.
    rejoin_at: Instant,
}

/// An open gRPC stream.
struct Connection {
    requests: mpsc::Sender<Request>,
    responses: Streaming<Response>,
}

impl Transport for ServerSession {
    const MIN_BACKOFF: Duration = Duration::from_millis(50);
    type Connection = Connection;
    type Event = Result<Response, String>;

    fn tracker(&mut self) -> &mut LeaseTracker {
        self.session.tracker()
    }

    fn connect(
        &mut self,
    ) -> impl Future<Output = Result<Connection, SessionError>> + Send + 'static {
        let endpoint = Arc::clone(&self.endpoint);
        async move { endpoint.open().await }
    }

    fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    fn on_connected(&mut self, connection: Connection) -> Result<(), SessionError> {
        self.connection = Some(connection);
        self.last_received = Instant::now();
        self.send_join()
    }

    fn on_disconnected(&mut self) {
        self.connection = None;
        self.session.on_disconnect();
    }

    async fn next_event(&mut self) -> Result<Response, String> {
        next_response(&mut self.connection).await
    }

    fn handle_event(&mut self, event: Result<Response, String>) -> Result<(), SessionError> {
        let response = event.map_err(SessionError::Disconnected)?;
        self.last_received = Instant::now();
        let had_joined = self.session.has_joined();
        let handled = self.session.handle_response(response);
        if had_joined && !self.session.has_joined() {
            self.rejoin_at = Instant::now(); // the lease expired
        }
        handled.map_err(|rejection| {
            if rejection.is_retryable() {
                SessionError::Transient(rejection.to_string())
            } else {
                SessionError::Rejected(rejection)
            }
        })
    }

    fn wake_at(&self) -> Option<Instant> {
        self.connection.as_ref()?;
        let silent_at = self.last_received + self.silence_timeout;
        if self.session.has_joined() {
            Some(silent_at)
        } else {
            Some(silent_at.min(self.rejoin_at))
        }
    }

    fn on_timer(&mut self, now: Instant) -> Result<(), SessionError> {
        if self.connection.is_none() {
            return Ok(());
        }
        if now >= self.last_received + self.silence_timeout {
            let cause = format!("the server sent nothing for {:?}", self.silence_timeout);
            return Err(SessionError::Disconnected(cause));
        }
        if !self.session.has_joined() && now >= self.rejoin_at {
            self.send_join()
        } else {
            Ok(())
        }
    }

    fn heartbeat(&mut self) -> Result<(), SessionError> {
        self.send_pending()
    }

    fn report(&mut self, epoch: Epoch, report: Report) -> Result<(), SessionError> {
        let request = self.session.report(epoch, report, self.started.elapsed());
        self.send(request)
    }

    async fn leave(&mut self) {
        let request = self.session.leave(self.started.elapsed());
        let left = request.id;
        if self.send([request]).is_err() {
            return;
        }
        let acknowledged = async {
            while self.connection.is_some() {
                match next_response(&mut self.connection).await {
                    Ok(Response::Ack { id, .. } | Response::Rejected { id, .. }) if id == left => {
                        return;
                    }
                    Ok(_) => {}
                    Err(_) => return,
                }
            }
        };
        let _ = timeout(LEAVE_TIMEOUT, acknowledged).await;
    }
}

impl ServerSession {
    fn send_join(&mut self) -> Result<(), SessionError> {
        self.rejoin_at = Instant::now() + self.heartbeat;
        self.send_pending()
    }

    /// Sends a join or a heartbeat, and an unacknowledged report; nothing if the agent is stalled.
    fn send_pending(&mut self) -> Result<(), SessionError> {
        let now = self.started.elapsed();
        if self.session.tracker().is_stalled(now) {
            return Ok(());
        }
        let requests = self.session.poll_requests(now);
        self.send(requests)
    }

    /// Without a connection this does nothing: the session repeats its requests on the next one.
    fn send(&self, requests: impl IntoIterator<Item = Request>) -> Result<(), SessionError> {
        let Some(connection) = &self.connection else {
            return Ok(());
        };
        for request in requests {
            let sent = connection.requests.try_send(request);
            sent.map_err(|error| SessionError::Disconnected(format!("cannot send: {error}")))?;
        }
        Ok(())
    }
}

/// The next response, or the error that ended the stream; waits forever without a connection.
async fn next_response(connection: &mut Option<Connection>) -> Result<Response, String> {
    let Some(connection) = connection else {
        return std::future::pending().await;
    };
    match connection.responses.message().await {
        Ok(Some(response)) => Ok(response),
        Ok(None) => Err("the server closed the stream".into()),
        Err(status) => Err(status.to_string()),
    }
}

impl Endpoint {
    async fn open(&self) -> Result<Connection, SessionError> {
        let opened = timeout(CONNECT_TIMEOUT, self.try_open()).await;
        opened.unwrap_or_else(|_| {
            let cause = format!("no response within {CONNECT_TIMEOUT:?}");
            Err(SessionError::Disconnected(cause))
        })
    }

    async fn try_open(&self) -> Result<Connection, SessionError> {
        let failed = |error: tonic::transport::Error| SessionError::Disconnected(chain(&error));
        let channel = self.channel().await.map_err(failed)?;
        let (requests, outbound) = mpsc::channel(REQUEST_QUEUE);
        let mut grpc = tonic::client::Grpc::new(channel).max_decoding_message_size(MAX_FRAME_BYTES);
        grpc.ready().await.map_err(failed)?;
        let outbound = tonic::Request::new(ReceiverStream::new(outbound));
        let path = PathAndQuery::from_static(SESSION_METHOD);
        let codec = Json::<Request, Response>::default();
        let responses = grpc.streaming(outbound, path, codec).await;
        Ok(Connection {
            requests,
            responses: responses
                .map_err(|status| self.stream_error(&status))?
                .into_inner(),
        })
    }

    /// A server that does not implement the method speaks another version of the protocol.
    fn stream_error(&self, status: &Status) -> SessionError {
        match status.code() {
            Code::Unimplemented => SessionError::Fatal(RendezvousError::ProtocolVersion {
                endpoint: self.address.to_string(),
                found: status.message().to_owned(),
                supported: PROTOCOL_VERSION,
            }),
            _ => SessionError::Disconnected(chain(status)),
        }
    }

    async fn channel(&self) -> Result<Channel, tonic::transport::Error> {
        let (address, tls) = (self.address.clone(), Arc::clone(&self.tls));
        let connect = move |_: http::Uri| {
            let (address, tls) = (address.clone(), Arc::clone(&tls));
            Box::pin(async move { connect(&address, &tls).await.map(TokioIo::new) })
        };
        tonic::transport::Endpoint::from_static("http://rendezvous")
            .connect_with_connector(tower::service_fn(connect))
            .await
    }
}

async fn connect(address: &Address, tls: &Arc<ClientConfig>) -> io::Result<TlsStream<TcpStream>> {
    let connected = TcpStream::connect((address.host.as_str(), address.port));
    let stream = timeout(TCP_TIMEOUT, connected).await??;
    stream.set_nodelay(true)?;
    // The server's key is pinned, so its name is not checked.
    let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
    TlsConnector::from(Arc::clone(tls))
        .connect(name, stream)
        .await
}

/// An error with all its sources: the last one usually names the cause.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        source = error.source();
    }
    text
}
