//! Hostile and faulty clients: the server rejects them, and the run is not affected.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use trainyard_rendezvous::server::{Client, Limits, Server, serve};
use trainyard_rendezvous::{
    Address, Decision, Epoch, Join, RankAssignment, Rejection, RendezvousError, Report, RunSecret,
};

use super::agent::{Agent, join, policy};
use super::server::{LOOPBACK, address};

/// A run of one agent, and what a test needs to attack it.
struct Target {
    server: Server,
    secret: RunSecret,
    agent: Agent,
    assignment: RankAssignment,
    _dir: tempfile::TempDir,
}

impl Target {
    async fn start(limits: Limits) -> Target {
        let dir = tempfile::tempdir().unwrap();
        let secret = RunSecret::random().unwrap();
        let record = dir.path().join("record");
        let server = serve(LOOPBACK, "job", &secret, &record, limits)
            .await
            .unwrap();
        let client = Client::new(address(&server), "job", &secret).unwrap();
        let agent = Agent::start(&client, join("job", "a", &policy(1, 2)))
            .await
            .unwrap();
        let assignment = agent.assignment_after(Epoch(0)).await;
        Target {
            server,
            secret,
            agent,
            assignment,
            _dir: dir,
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.server.address()).await.unwrap()
    }

    fn client(&self, run: &str, secret: &RunSecret) -> Client {
        Client::new(address(&self.server), run, secret).unwrap()
    }

    /// Checks that the run goes on as before, and that its agent can still report.
    async fn check_unaffected(&self) {
        tokio::time::sleep(policy(1, 2).lease).await;
        assert_eq!(self.agent.now(), Decision::Run(self.assignment.clone()));
        self.agent
            .report(self.assignment.epoch, Report::Succeeded)
            .await;
        self.agent.closed().await;
    }
}

fn impatient(run: &str, node: &str) -> Join {
    let mut policy = policy(1, 2);
    policy.join_timeout = Duration::from_secs(1);
    join(run, node, &policy)
}

/// Waits until the server has closed the connection.
async fn read_to_end(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
}

#[tokio::test]
async fn a_wrong_secret_is_rejected() {
    let target = Target::start(Limits::default()).await;
    let client = target.client("job", &RunSecret::random().unwrap());
    let rejected = Agent::start(&client, impatient("job", "b")).await;
    assert!(matches!(
        rejected.err(),
        Some(RendezvousError::Unreachable { .. })
    ));
    target.check_unaffected().await;
}

#[tokio::test]
async fn another_run_is_rejected_even_with_the_same_secret() {
    let target = Target::start(Limits::default()).await;
    let client = target.client("other", &target.secret);
    let rejected = Agent::start(&client, impatient("other", "b")).await;
    assert!(
        matches!(rejected.err(), Some(RendezvousError::Unreachable { .. })),
        "its keys differ"
    );
    let client = target.client("job", &target.secret);
    let rejected = Agent::start(&client, impatient("other", "b")).await;
    let is_wrong_run = matches!(
        rejected.err(),
        Some(RendezvousError::Rejected(Rejection::WrongRun { .. }))
    );
    assert!(is_wrong_run, "its name differs");
    target.check_unaffected().await;
}

#[tokio::test]
async fn random_bytes_are_rejected() {
    let target = Target::start(Limits::default()).await;
    let mut noise = blake3_noise();
    for length in [0, 1, 5, 100, 5000, 70_000] {
        for _ in 0..20 {
            let mut bytes = vec![0; length];
            noise.fill(&mut bytes);
            let mut stream = target.connect().await;
            let _ = stream.write_all(&bytes).await;
            let _ = stream.shutdown().await;
            read_to_end(&mut stream).await;
        }
    }
    target.check_unaffected().await;
}

#[tokio::test]
async fn frames_with_excessive_lengths_are_rejected_before_they_are_read() {
    let target = Target::start(Limits::default()).await;
    // A TLS record of the maximum length, a handshake message of 16 MB, and HTTP/2 without TLS.
    let record = [22, 3, 1, 0xff, 0xff, 1, 0xff, 0xff, 0xff];
    let message = [22, 3, 1, 0x40, 0x00, 1, 0xff, 0xff, 0xff];
    let plain = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x04\x00\x00\x00\x00\x00";
    for bytes in [&record[..], &message, plain] {
        let mut stream = target.connect().await;
        stream.write_all(bytes).await.unwrap();
        let began = Instant::now();
        // Send more until the server closes the connection.
        while stream.write_all(&[0; 4096]).await.is_ok() {
            assert!(
                began.elapsed() < Duration::from_secs(10),
                "the server still reads"
            );
        }
    }
    // The same from a client that knows the secret.
    let client = target.client("job", &target.secret);
    let mut large = impatient("job", "b");
    large.node_info.capabilities = (0..5000)
        .map(|number| format!("capability-{number}"))
        .collect();
    let rejected = Agent::start(&client, large).await;
    assert!(matches!(
        rejected.err(),
        Some(RendezvousError::Unreachable { .. })
    ));
    target.check_unaffected().await;
}

#[tokio::test]
async fn idle_connections_do_not_keep_agents_out() {
    let limits = Limits {
        handshakes: 8,
        handshake_timeout: Duration::from_secs(2),
        ..Limits::default()
    };
    let target = Target::start(limits).await;
    let mut idle = Vec::new();
    for _ in 0..100 {
        let mut stream = target.connect().await;
        let _ = stream.write_all(&[22, 3, 1]).await; // only the beginning of a handshake
        idle.push(stream);
    }
    let client = target.client("job", &target.secret);
    let began = Instant::now();
    let agent = Agent::start(&client, join("job", "b", &policy(1, 2)))
        .await
        .unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "it took {:?}",
        began.elapsed()
    );
    agent.leave().await;
    // The server closes all idle connections in time.
    let closed = futures_util::future::join_all(idle.iter_mut().map(read_to_end));
    tokio::time::timeout(Duration::from_secs(4), closed)
        .await
        .expect("the server left idle connections open");
    assert_eq!(target.agent.now(), Decision::Run(target.assignment.clone()));
}

#[tokio::test]
async fn connections_beyond_the_limit_are_rejected() {
    let limits = Limits {
        connections: 1,
        ..Limits::default()
    };
    let target = Target::start(limits).await;
    let client = target.client("job", &target.secret);
    let rejected = Agent::start(&client, impatient("job", "b")).await;
    assert!(matches!(
        rejected.err(),
        Some(RendezvousError::Unreachable { .. })
    ));
    target.check_unaffected().await;
}

#[tokio::test]
async fn a_recorded_session_cannot_be_replayed() {
    let target = Target::start(Limits::default()).await;
    let listener = TcpListener::bind(LOOPBACK).await.unwrap();
    let proxy = Address {
        host: "127.0.0.1".into(),
        port: listener.local_addr().unwrap().port(),
    };
    let server = target.server.address();
    let record = tokio::spawn(async move {
        let (mut from, _) = listener.accept().await.unwrap();
        let mut to = TcpStream::connect(server).await.unwrap();
        let (mut from_read, mut from_write) = from.split();
        let (mut to_read, mut to_write) = to.split();
        let mut recorded = Vec::new();
        let forward = async {
            let mut buffer = [0; 4096];
            loop {
                match from_read.read(&mut buffer).await {
                    Ok(count) if count > 0 => {
                        recorded.extend_from_slice(&buffer[..count]);
                        to_write.write_all(&buffer[..count]).await.unwrap();
                    }
                    _ => return,
                }
            }
        };
        tokio::select! {
            () = forward => {}
            _ = tokio::io::copy(&mut to_read, &mut from_write) => {}
        }
        recorded
    });
    let client = Client::new(proxy, "job", &target.secret).unwrap();
    let agent = Agent::start(&client, join("job", "b", &policy(1, 2)))
        .await
        .unwrap();
    agent.leave().await;
    let recorded = record.await.unwrap();
    assert!(recorded.len() > 500, "the agent sent requests");
    let before = target.server.traffic();
    let mut stream = target.connect().await;
    let _ = stream.write_all(&recorded).await;
    let _ = stream.shutdown().await;
    read_to_end(&mut stream).await;
    let (requests, _) = target.server.traffic();
    assert!(
        requests - before.0 <= 2,
        "the server received only the agent's own heartbeats"
    );
}

#[tokio::test]
async fn the_server_listens_only_on_the_given_address() {
    let target = Target::start(Limits::default()).await;
    let elsewhere = ("127.0.0.2", target.server.address().port());
    assert!(TcpStream::connect(elsewhere).await.is_err());
}

fn blake3_noise() -> blake3::OutputReader {
    blake3::Hasher::new().update(b"noise").finalize_xof()
}
