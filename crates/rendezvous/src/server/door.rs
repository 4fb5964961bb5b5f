//! Where connections come in: how many, how fast, and from whom.
//!
//! A stranger gets as far as the TLS handshake, which has a deadline. When too many shake hands at once the one that
//! has been at it longest is shown out, so that idle strangers cannot keep agents from coming in.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
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
use tonic::{Code, Request, Response, Status, Streaming};

use super::disk::Disk;
use super::identity::server_config;
use super::office::{MOST_WAITING, Mail, Office, Traffic};
use super::wire::{ATTEND, Json, LONGEST_FRAME};
use crate::{Answer, Letter, RendezvousError, Secret};

/// What a server puts up with.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Agents connected at once.
    pub connections: usize,
    /// Connections that have not proven yet that they know the secret.
    pub handshakes: usize,
    /// How long they have for it.
    pub handshake_within: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 16_384,
            handshakes: 1024,
            handshake_within: Duration::from_secs(5),
        }
    }
}

/// A server that runs until it is dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    traffic: Arc<Traffic>,
    places: Arc<Semaphore>,
    num_places: usize,
    office: JoinHandle<Result<(), RendezvousError>>,
    door: JoinHandle<()>,
}

/// Serves one run at this address and no other, and goes on from the record in the file, if there is one.
pub async fn serve(
    address: SocketAddr,
    run: &str,
    secret: &Secret,
    record: &Path,
    limits: Limits,
) -> Result<Server, RendezvousError> {
    let refuse = |cause: String| RendezvousError::Serve {
        address: address.to_string(),
        cause,
    };
    crate::advert::check_name("run", run)?;
    let tls = server_config(secret, run).map_err(|error| refuse(error.to_string()))?;
    let (disk, record) = Disk::open(record, run)?;
    let listener = TcpListener::bind(address)
        .await
        .map_err(|error| refuse(error.to_string()))?;
    let address = listener
        .local_addr()
        .map_err(|error| refuse(error.to_string()))?;
    let (post, mail) = channel(4096);
    let traffic = Arc::new(Traffic::default());
    let (num_places, places) = (
        limits.connections,
        Arc::new(Semaphore::new(limits.connections)),
    );
    let door = Door {
        tls: TlsAcceptor::from(tls),
        places: Arc::clone(&places),
        limits,
        post,
        handshakes: VecDeque::new(),
        guests: JoinSet::new(),
    };
    Ok(Server {
        address,
        office: tokio::spawn(Office::new(record, disk, Arc::clone(&traffic)).run(mail)),
        traffic,
        places,
        num_places,
        door: tokio::spawn(door.attend(listener)),
    })
}

/// Serves until it cannot go on, for programs that do nothing else. `ready` is told where it listens.
pub fn serve_forever(
    address: SocketAddr,
    run: &str,
    secret: &Secret,
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
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many agents are connected.
    pub fn num_connected(&self) -> usize {
        self.num_places
            .saturating_sub(self.places.available_permits())
    }

    /// How many letters came so far, and how many answers went.
    pub fn traffic(&self) -> (u64, u64) {
        self.traffic.count()
    }

    /// Waits until it cannot go on.
    pub async fn run(&mut self) -> Result<(), RendezvousError> {
        match (&mut self.office).await {
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
        self.door.abort();
        self.office.abort();
    }
}

struct Door {
    tls: TlsAcceptor,
    places: Arc<Semaphore>,
    limits: Limits,
    post: Sender<Mail>,
    /// Those that may not have proven yet that they know the secret, oldest first.
    handshakes: VecDeque<(AbortHandle, Arc<Proven>)>,
    guests: JoinSet<()>,
}

/// Whether a connection has shaken hands.
#[derive(Default)]
struct Proven(std::sync::atomic::AtomicBool);

impl Proven {
    fn set(&self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(std::sync::atomic::Ordering::Relaxed)
    }
}

impl Door {
    async fn attend(mut self, listener: TcpListener) {
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, from)) => self.admit(stream, from),
                    // Out of descriptors, or gone again: others may still be served.
                    Err(error) => {
                        tracing::warn!(%error, "accept");
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                },
                Some(_) = self.guests.join_next() => {}
            }
        }
    }

    fn admit(&mut self, stream: TcpStream, from: SocketAddr) {
        self.handshakes
            .retain(|(task, proven)| !task.is_finished() && !proven.get());
        if self.handshakes.len() >= self.limits.handshakes
            && let Some((oldest, _)) = self.handshakes.pop_front()
        {
            tracing::warn!("too many handshakes at once: the oldest is shown out");
            oldest.abort();
        }
        let proven = Arc::new(Proven::default());
        let (tls, post) = (self.tls.clone(), self.post.clone());
        let (places, within) = (Arc::clone(&self.places), self.limits.handshake_within);
        let is_proven = Arc::clone(&proven);
        let task = self.guests.spawn(async move {
            let _ = stream.set_nodelay(true);
            let stream = match timeout(within, tls.accept(stream)).await {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => {
                    return tracing::warn!(%from, %error, "refused: no proof of the run's secret");
                }
                Err(_) => {
                    return tracing::warn!(%from, "refused: no proof of the run's secret in time");
                }
            };
            is_proven.set();
            let Ok(_place) = places.try_acquire() else {
                return tracing::warn!(%from, "refused: too many connections");
            };
            receive(stream, post).await;
        });
        self.handshakes.push_back((task, proven));
    }
}

/// Speaks HTTP/2 with a connection until it ends.
async fn receive(stream: TlsStream<TcpStream>, post: Sender<Mail>) {
    let service = service_fn(move |request: http::Request<Incoming>| {
        let post = post.clone();
        async move {
            if request.uri().path() != ATTEND {
                return Ok::<_, std::convert::Infallible>(
                    Status::unimplemented("only Attend").into_http(),
                );
            }
            let codec = Json::<Answer, Letter>::default();
            let mut grpc = Grpc::new(codec).max_decoding_message_size(LONGEST_FRAME);
            Ok(grpc.streaming(Attend { post }, request).await)
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
        tracing::debug!(%error, "connection ended");
    }
}

/// One agent's stream.
struct Attend {
    post: Sender<Mail>,
}

impl StreamingService<Letter> for Attend {
    type Response = Answer;
    type ResponseStream = futures_util::stream::BoxStream<'static, Result<Answer, Status>>;
    type Future = BoxFuture<'static, Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<Letter>>) -> Self::Future {
        let post = self.post.clone();
        Box::pin(async move {
            let (reply_to, answers) = channel(MOST_WAITING);
            tokio::spawn(forward(request.into_inner(), post, reply_to));
            let answers: Self::ResponseStream = ReceiverStream::new(answers).map(Ok).boxed();
            Ok(Response::new(answers))
        })
    }
}

/// Ends when the agent's side does; then its answers end too, because nobody else holds on to them for long.
async fn forward(mut letters: Streaming<Letter>, post: Sender<Mail>, reply_to: Sender<Answer>) {
    loop {
        let letter = match letters.message().await {
            Ok(Some(letter)) => letter,
            Ok(None) => return,
            Err(status) if status.code() == Code::InvalidArgument => {
                return tracing::warn!(%status, "refused: not a letter");
            }
            Err(status) => return tracing::debug!(%status, "an agent's line broke"),
        };
        let reply_to = reply_to.clone();
        if post.send(Mail { letter, reply_to }).await.is_err() {
            return;
        }
    }
}
