//! The server backend.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;
use trainyard_rendezvous::server::{Client, Limits, PROTOCOL_VERSION, Server, serve};
use trainyard_rendezvous::{Address, Backend, Decision, Epoch, RendezvousError, RunSecret};
use trainyard_tls::{Identity, Service};

use super::agent::{Agent, join, policy};
use super::suite::{BackendFactory, every_backend};

pub const LOOPBACK: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

pub fn address(server: &Server) -> Address {
    Address {
        host: server.address().ip().to_string(),
        port: server.address().port(),
    }
}

struct ServerFactory {
    dir: PathBuf,
    running: Mutex<Vec<Server>>,
}

#[async_trait]
impl BackendFactory for ServerFactory {
    async fn open(&self, run: &str) -> Arc<dyn Backend> {
        let secret = RunSecret::random().unwrap();
        let server = serve(
            LOOPBACK,
            run,
            &secret,
            &self.dir.join(run),
            Limits::default(),
        )
        .await
        .unwrap();
        let client = Client::new(address(&server), run, &secret).unwrap();
        self.running.lock().unwrap().push(server);
        Arc::new(client)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_passes_the_backend_suite() {
    let dir = tempfile::tempdir().unwrap();
    let servers = ServerFactory {
        dir: dir.path().to_owned(),
        running: Mutex::default(),
    };
    every_backend(&servers).await;
}

/// A server of the run `job` that can be stopped, and restarted on the same address.
struct TestServer {
    dir: TempDir,
    secret: RunSecret,
    server: Server,
}

impl TestServer {
    async fn start() -> TestServer {
        let dir = tempfile::tempdir().unwrap();
        let secret = RunSecret::random().unwrap();
        let server = TestServer::serve(LOOPBACK, &secret, dir.path())
            .await
            .unwrap();
        TestServer {
            dir,
            secret,
            server,
        }
    }

    async fn serve(
        at: SocketAddr,
        secret: &RunSecret,
        dir: &Path,
    ) -> Result<Server, RendezvousError> {
        serve(at, "job", secret, &dir.join("record"), Limits::default()).await
    }

    fn client(&self) -> Client {
        self.client_at(address(&self.server))
    }

    fn client_at(&self, address: Address) -> Client {
        Client::new(address, "job", &self.secret).unwrap()
    }

    /// Stops the server until it is restarted.
    fn stop(self) -> Stopped {
        Stopped {
            at: self.server.address(),
            dir: self.dir,
            secret: self.secret,
        }
    }
}

struct Stopped {
    at: SocketAddr,
    dir: TempDir,
    secret: RunSecret,
}

impl Stopped {
    async fn restart(&self) -> Server {
        loop {
            match TestServer::serve(self.at, &self.secret, self.dir.path()).await {
                Ok(server) => return server,
                Err(error) if error.to_string().contains("in use") => {
                    tokio::task::yield_now().await;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[tokio::test]
async fn a_restart_of_the_server_does_not_interrupt_the_run_or_reuse_an_epoch() {
    let served = TestServer::start().await;
    let client = served.client();
    let policy = policy(1, 2);
    let a = Agent::start(&client, join("job", "a", &policy))
        .await
        .unwrap();
    let b = Agent::start(&client, join("job", "b", &policy))
        .await
        .unwrap();
    let epoch = a.assignment_after(Epoch(0)).await.epoch;
    b.assignment_after(Epoch(0)).await;

    let stopped = served.stop();
    let _server = stopped.restart().await;
    // Two leases later every agent has the same rank.
    tokio::time::sleep(2 * policy.lease).await;
    for agent in [&a, &b] {
        assert!(matches!(agent.now(), Decision::Run(assignment) if assignment.epoch == epoch));
    }
    b.kill();
    assert_eq!(a.assignment_after(epoch).await.epoch, epoch.next());
}

#[tokio::test]
async fn a_server_that_lost_its_record_is_accepted_and_reuses_no_epoch() {
    let served = TestServer::start().await;
    let client = served.client();
    let policy = policy(1, 2);
    let start = |node| Agent::start(&client, join("job", node, &policy));
    let (a, b) = (start("a").await.unwrap(), start("b").await.unwrap());
    b.assignment_after(Epoch(0)).await;
    b.leave().await;
    a.assignment_after(Epoch(1)).await;
    let b = start("b").await.unwrap();
    let epoch = b.assignment_after(Epoch(2)).await.epoch;

    let stopped = served.stop();
    std::fs::remove_file(stopped.dir.path().join("record")).unwrap();
    let _server = stopped.restart().await;
    let places = [
        a.assignment_after(epoch).await,
        b.assignment_after(epoch).await,
    ];
    assert_eq!(places[0].epoch, places[1].epoch);
}

#[tokio::test]
async fn an_agent_gives_up_after_the_join_timeout() {
    let served = TestServer::start().await;
    let mut policy = policy(1, 1);
    policy.join_timeout = Duration::from_secs(2);
    let join = join("job", "a", &policy);
    let mut agent = Agent::start(&served.client(), join).await.unwrap();
    agent.assignment_after(Epoch(0)).await;
    let _stopped = served.stop();
    assert!(agent.is_cut_off().await);
}

#[tokio::test]
async fn split_brain_an_agent_that_cannot_reach_the_server_stops_by_itself() {
    let served = TestServer::start().await;
    let client = served.client();
    let policy = policy(1, 1);
    let agent = Agent::start(&client, join("job", "a", &policy))
        .await
        .unwrap();
    let epoch = agent.assignment_after(Epoch(0)).await.epoch;
    let began = std::time::Instant::now();
    let stopped = served.stop();
    let is_expired = |decision: &Decision| *decision == Decision::LeaseExpired { epoch };
    agent.wait_for("its lease to expire", is_expired).await;
    assert!(
        began.elapsed() < policy.lease,
        "before another node can get its rank"
    );
    let _server = stopped.restart().await;
    assert!(
        agent.assignment_after(epoch).await.epoch > epoch,
        "it never runs workers of that epoch again"
    );
}

/// A proxy to a server. On `cut` it silently drops the packets of all open connections, without closing them.
async fn proxy(server: SocketAddr, cut: Arc<Notify>) -> Address {
    let listener = TcpListener::bind(LOOPBACK).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (mut from, _) = listener.accept().await.unwrap();
            let cut = Arc::clone(&cut);
            tokio::spawn(async move {
                let mut to = TcpStream::connect(server).await.unwrap();
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut from, &mut to) => {}
                    () = cut.notified() => std::future::pending().await,
                }
            });
        }
    });
    Address {
        host: "127.0.0.1".into(),
        port,
    }
}

#[tokio::test]
async fn a_silent_connection_is_replaced() {
    let served = TestServer::start().await;
    let cut = Arc::<Notify>::default();
    let client = served.client_at(proxy(served.server.address(), Arc::clone(&cut)).await);
    let agent = Agent::start(&client, join("job", "a", &policy(1, 1)))
        .await
        .unwrap();
    let epoch = agent.assignment_after(Epoch(0)).await.epoch;
    cut.notify_waiters();
    assert!(agent.assignment_after(epoch).await.epoch > epoch);
}

/// A server that implements no method, as one with another version of the protocol.
async fn serve_another_protocol(run: &str, secret: &RunSecret) -> Address {
    let identity = Identity::new(secret, Service::Rendezvous, run).unwrap();
    let tls = TlsAcceptor::from(identity.server_config().unwrap());
    let listener = TcpListener::bind(LOOPBACK).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let stream = TokioIo::new(tls.accept(stream).await.unwrap());
        let service = service_fn(|_| async {
            let status = tonic::Status::unimplemented("only Attend");
            Ok::<_, std::convert::Infallible>(status.into_http::<tonic::body::Body>())
        });
        let http = http2::Builder::new(TokioExecutor::new());
        http.serve_connection(stream, service).await.unwrap();
    });
    Address {
        host: "127.0.0.1".into(),
        port,
    }
}

#[tokio::test]
async fn a_server_of_another_protocol_version_is_rejected_at_once() {
    let secret = RunSecret::random().unwrap();
    let address = serve_another_protocol("job", &secret).await;
    let client = Client::new(address, "job", &secret).unwrap();
    let joined = Agent::start(&client, join("job", "a", &policy(1, 1))).await;
    let error = joined.err().expect("the versions differ");
    assert!(
        matches!(
            &error,
            RendezvousError::ProtocolVersion { found, supported: PROTOCOL_VERSION, .. }
                if found == "only Attend"
        ),
        "{error:?}"
    );
}
