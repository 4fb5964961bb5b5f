//! The HTTP servers: one for `/metrics`, and one for the page of the job.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::channel::{Channel, Sender};
use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::exposition::{Format, exposition};
use crate::page::{self, Received, Token};
use crate::telemetry::Source;

/// More than the scrapers and the open pages of a job.
const MAX_CONNECTIONS: usize = 32;
/// How long a client may take to send a request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait after a connection could not be accepted, for example because too many files are open.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often a page is updated.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);
/// Messages that wait to be sent. A page that is slower gets fewer.
const MAX_WAITING_MESSAGES: usize = 1;

/// What a server offers.
#[derive(Clone, Debug)]
pub(crate) enum Site {
    /// Metrics, to everyone who reaches the server.
    Metrics,
    /// The page, to everyone who has the token.
    Page(Token),
}

/// A server that accepts connections.
#[derive(Debug)]
pub(crate) struct Server {
    listener: TcpListener,
    /// Where it is reached.
    pub(crate) address: SocketAddr,
    site: Site,
}

/// The answer to a request: a text, or the messages to a page.
type Body = Either<Full<Bytes>, Channel<Bytes>>;

impl Server {
    /// Reserves the address.
    pub(crate) async fn bind(address: SocketAddr, site: Site) -> io::Result<Server> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok(Server {
            listener,
            address,
            site,
        })
    }

    /// Serves every connection until the runtime ends.
    pub(crate) async fn serve(self, source: Arc<Source>) {
        let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        while let Ok(permit) = Arc::clone(&connections).acquire_owned().await {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let (source, site) = (Arc::clone(&source), self.site.clone());
                    tokio::spawn(async move {
                        serve_connection(stream, source, site).await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    tracing::debug!("cannot accept a connection: {error}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

async fn serve_connection(stream: TcpStream, source: Arc<Source>, site: Site) {
    let service = service_fn(move |request: Request<Incoming>| {
        let response = respond(&request, &source, &site);
        async move { Ok::<_, Infallible>(response) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = served.await {
        tracing::debug!("a connection failed: {error}");
    }
}

fn respond<B>(request: &Request<B>, source: &Arc<Source>, site: &Site) -> Response<Body> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return refusal(StatusCode::METHOD_NOT_ALLOWED, "only GET is allowed\n");
    }
    let (path, query) = (request.uri().path(), request.uri().query());
    match (site, path) {
        (Site::Metrics, "/metrics") => {
            let accept = request.headers().get(ACCEPT);
            let accept = accept.and_then(|accept| accept.to_str().ok());
            let format = Format::accepted(accept.unwrap_or_default());
            let body = exposition(&source.families(), format);
            with_type(text(StatusCode::OK, body), format.content_type())
        }
        (Site::Metrics, _) => refusal(StatusCode::NOT_FOUND, "metrics are at /metrics\n"),
        (Site::Page(token), _) if !token.is_in(query) => refusal(
            StatusCode::FORBIDDEN,
            "open the address that `trainyard` printed, which ends in ?token=...\n",
        ),
        (Site::Page(_), "/") => html(),
        (Site::Page(_), "/events") => events(source),
        (Site::Page(_), _) => refusal(StatusCode::NOT_FOUND, "the page is at /\n"),
    }
}

fn html() -> Response<Body> {
    let response = text(StatusCode::OK, page::HTML.to_owned());
    let response = with_type(response, "text/html; charset=utf-8");
    let policy = page::CONTENT_SECURITY_POLICY;
    private(with_header(response, CONTENT_SECURITY_POLICY, policy))
}

/// Server-sent events: a message each second, until the page is closed.
fn events(source: &Arc<Source>) -> Response<Body> {
    let (sender, body) = Channel::new(MAX_WAITING_MESSAGES);
    tokio::spawn(send_events(sender, Arc::clone(source)));
    let response = Response::new(Either::Right(body));
    private(with_type(response, "text/event-stream"))
}

async fn send_events(mut sender: Sender<Bytes>, source: Arc<Source>) {
    let mut received = Received::default();
    loop {
        let message = match source.message(received) {
            Ok((message, now)) => {
                received = now;
                message
            }
            Err(error) => return tracing::debug!("cannot describe the job: {error}"),
        };
        let event = Bytes::from(format!("data: {message}\n\n"));
        if sender.send_data(event).await.is_err() {
            return;
        }
        tokio::time::sleep(UPDATE_INTERVAL).await;
    }
}

fn refusal(status: StatusCode, body: &str) -> Response<Body> {
    text(status, body.to_owned())
}

fn text(status: StatusCode, body: String) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::new(Bytes::from(body))));
    *response.status_mut() = status;
    with_type(response, "text/plain; charset=utf-8")
}

fn with_type(response: Response<Body>, media_type: &'static str) -> Response<Body> {
    let response = with_header(response, CONTENT_TYPE, media_type);
    with_header(response, X_CONTENT_TYPE_OPTIONS, "nosniff")
}

/// The token is in the address, which neither caches nor other sites may learn.
fn private(response: Response<Body>) -> Response<Body> {
    let response = with_header(response, CACHE_CONTROL, "no-store");
    with_header(response, REFERRER_POLICY, "no-referrer")
}

fn with_header(
    mut response: Response<Body>,
    name: HeaderName,
    value: &'static str,
) -> Response<Body> {
    let value = HeaderValue::from_static(value);
    response.headers_mut().insert(name, value);
    response
}
