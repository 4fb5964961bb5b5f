//! The built-in server.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use trainyard_rendezvous::server::{Client, Limits, Server, serve};
use trainyard_rendezvous::{Address, Backend, Decision, Epoch, RendezvousError, Secret};

use crate::agent::{Agent, join, policy};
use crate::suite::{Venue, every_backend};

pub const LOOPBACK: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

pub fn address(server: &Server) -> Address {
    Address {
        host: server.address().ip().to_string(),
        port: server.address().port(),
    }
}

struct Servers {
    folder: PathBuf,
    running: Mutex<Vec<Server>>,
}

#[async_trait]
impl Venue for Servers {
    async fn open(&self, run: &str) -> Arc<dyn Backend> {
        let secret = Secret::random().unwrap();
        let server = serve(
            LOOPBACK,
            run,
            &secret,
            &self.folder.join(run),
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
async fn a_server_does_what_every_backend_must() {
    let folder = tempfile::tempdir().unwrap();
    let servers = Servers {
        folder: folder.path().to_owned(),
        running: Mutex::default(),
    };
    every_backend(&servers).await;
}

/// A server of the run `job` that can be ended, and started where it was.
struct Served {
    folder: TempDir,
    secret: Secret,
    server: Server,
}

impl Served {
    async fn start() -> Served {
        let folder = tempfile::tempdir().unwrap();
        let secret = Secret::random().unwrap();
        let server = Served::serve(LOOPBACK, &secret, folder.path())
            .await
            .unwrap();
        Served {
            folder,
            secret,
            server,
        }
    }

    async fn serve(
        at: SocketAddr,
        secret: &Secret,
        folder: &Path,
    ) -> Result<Server, RendezvousError> {
        serve(at, "job", secret, &folder.join("record"), Limits::default()).await
    }

    fn client(&self) -> Client {
        self.client_at(address(&self.server))
    }

    fn client_at(&self, address: Address) -> Client {
        Client::new(address, "job", &self.secret).unwrap()
    }

    /// Nobody serves until it is started again.
    fn end(self) -> Ended {
        Ended {
            at: self.server.address(),
            folder: self.folder,
            secret: self.secret,
        }
    }
}

struct Ended {
    at: SocketAddr,
    folder: TempDir,
    secret: Secret,
}

impl Ended {
    async fn start_again(&self) -> Server {
        loop {
            match Served::serve(self.at, &self.secret, self.folder.path()).await {
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
async fn a_server_that_restarts_disturbs_nobody_and_reuses_no_epoch() {
    let served = Served::start().await;
    let client = served.client();
    let policy = policy(1, 2);
    let a = Agent::start(&client, join("job", "a", &policy))
        .await
        .unwrap();
    let b = Agent::start(&client, join("job", "b", &policy))
        .await
        .unwrap();
    let epoch = a.place_after(Epoch(0)).await.epoch;
    b.place_after(Epoch(0)).await;

    let ended = served.end();
    let _server = ended.start_again().await;
    // Two leases later everybody is where they were.
    tokio::time::sleep(2 * policy.lease).await;
    for agent in [&a, &b] {
        assert!(matches!(agent.now(), Decision::Run(place) if place.epoch == epoch));
    }
    b.kill();
    assert_eq!(a.place_after(epoch).await.epoch, epoch.next());
}

#[tokio::test]
async fn a_server_that_forgot_everything_is_believed_and_reuses_no_epoch() {
    let served = Served::start().await;
    let client = served.client();
    let policy = policy(1, 2);
    let start = |node| Agent::start(&client, join("job", node, &policy));
    let (a, b) = (start("a").await.unwrap(), start("b").await.unwrap());
    b.place_after(Epoch(0)).await;
    b.leave().await;
    a.place_after(Epoch(1)).await;
    let b = start("b").await.unwrap();
    let epoch = b.place_after(Epoch(2)).await.epoch;

    let ended = served.end();
    std::fs::remove_file(ended.folder.path().join("record")).unwrap();
    let _server = ended.start_again().await;
    let places = [a.place_after(epoch).await, b.place_after(epoch).await];
    assert_eq!(places[0].epoch, places[1].epoch);
}

#[tokio::test]
async fn an_agent_gives_up_when_nobody_serves_for_long() {
    let served = Served::start().await;
    let mut policy = policy(1, 1);
    policy.join_timeout = Duration::from_secs(2);
    let join = join("job", "a", &policy);
    let mut agent = Agent::start(&served.client(), join).await.unwrap();
    agent.place_after(Epoch(0)).await;
    let _ended = served.end();
    assert!(agent.is_cut().await);
}

#[tokio::test]
async fn split_brain_an_agent_that_reaches_nobody_stops_by_itself() {
    let served = Served::start().await;
    let client = served.client();
    let policy = policy(1, 1);
    let agent = Agent::start(&client, join("job", "a", &policy))
        .await
        .unwrap();
    let epoch = agent.place_after(Epoch(0)).await.epoch;
    let began = std::time::Instant::now();
    let ended = served.end();
    let lapsed = |decision: &Decision| *decision == Decision::Lapsed { epoch };
    agent.wait_for("its lease to lapse", lapsed).await;
    assert!(
        began.elapsed() < policy.lease,
        "before anybody else can have its place"
    );
    let _server = ended.start_again().await;
    assert!(
        agent.place_after(epoch).await.epoch > epoch,
        "it never goes back to that epoch"
    );
}

/// Passes connections on to a server. Those that are there when it is cut hear nothing any more, not even an end.
async fn tap(server: SocketAddr, cut: Arc<Notify>) -> Address {
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
async fn a_line_that_died_without_a_word_is_given_up() {
    let served = Served::start().await;
    let cut = Arc::<Notify>::default();
    let client = served.client_at(tap(served.server.address(), Arc::clone(&cut)).await);
    let agent = Agent::start(&client, join("job", "a", &policy(1, 1)))
        .await
        .unwrap();
    let epoch = agent.place_after(Epoch(0)).await.epoch;
    cut.notify_waiters();
    assert!(agent.place_after(epoch).await.epoch > epoch);
}
