//! Those who should not be here: refused, and nobody else notices.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use trainyard_rendezvous::server::{Client, Limits, Server, serve};
use trainyard_rendezvous::{
    Address, Decision, Epoch, Join, Place, Refusal, RendezvousError, Report, Secret,
};

use crate::agent::{Agent, join, policy};
use crate::server::{LOOPBACK, address};

/// A run of one agent, and what is needed to disturb it.
struct Scene {
    server: Server,
    secret: Secret,
    agent: Agent,
    place: Place,
    _folder: tempfile::TempDir,
}

impl Scene {
    async fn set(limits: Limits) -> Scene {
        let folder = tempfile::tempdir().unwrap();
        let secret = Secret::random().unwrap();
        let record = folder.path().join("record");
        let server = serve(LOOPBACK, "job", &secret, &record, limits)
            .await
            .unwrap();
        let client = Client::new(address(&server), "job", &secret).unwrap();
        let agent = Agent::start(&client, join("job", "a", &policy(1, 2)))
            .await
            .unwrap();
        let place = agent.place_after(Epoch(0)).await;
        Scene {
            server,
            secret,
            agent,
            place,
            _folder: folder,
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.server.address()).await.unwrap()
    }

    fn client(&self, run: &str, secret: &Secret) -> Client {
        Client::new(address(&self.server), run, secret).unwrap()
    }

    /// The run goes on as before, and still hears its agent.
    async fn check_nobody_noticed(&self) {
        tokio::time::sleep(policy(1, 2).lease).await;
        assert_eq!(self.agent.now(), Decision::Run(self.place.clone()));
        self.agent.report(self.place.epoch, Report::Succeeded).await;
        self.agent.closed().await;
    }
}

fn impatient(run: &str, node: &str) -> Join {
    let mut policy = policy(1, 2);
    policy.join_timeout = Duration::from_secs(1);
    join(run, node, &policy)
}

/// Until the other side has closed; what it sent before is of no interest.
async fn read_to_end(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
}

#[tokio::test]
async fn a_wrong_secret_is_refused() {
    let scene = Scene::set(Limits::default()).await;
    let client = scene.client("job", &Secret::random().unwrap());
    let refused = Agent::start(&client, impatient("job", "b")).await;
    assert!(matches!(
        refused.err(),
        Some(RendezvousError::Unreachable { .. })
    ));
    scene.check_nobody_noticed().await;
}

#[tokio::test]
async fn a_foreign_run_is_refused_even_with_the_same_secret() {
    let scene = Scene::set(Limits::default()).await;
    let client = scene.client("other", &scene.secret);
    let refused = Agent::start(&client, impatient("other", "b")).await;
    assert!(
        matches!(refused.err(), Some(RendezvousError::Unreachable { .. })),
        "by its keys"
    );
    let client = scene.client("job", &scene.secret);
    let refused = Agent::start(&client, impatient("other", "b")).await;
    let by_name = matches!(
        refused.err(),
        Some(RendezvousError::Refused(Refusal::OtherRun { .. }))
    );
    assert!(by_name, "by its name");
    scene.check_nobody_noticed().await;
}

#[tokio::test]
async fn random_bytes_are_refused() {
    let scene = Scene::set(Limits::default()).await;
    let mut noise = blake3_noise();
    for length in [0, 1, 5, 100, 5000, 70_000] {
        for _ in 0..20 {
            let mut bytes = vec![0; length];
            noise.fill(&mut bytes);
            let mut stream = scene.connect().await;
            let _ = stream.write_all(&bytes).await;
            let _ = stream.shutdown().await;
            read_to_end(&mut stream).await;
        }
    }
    scene.check_nobody_noticed().await;
}

#[tokio::test]
async fn frames_that_claim_too_much_are_refused_before_they_are_read() {
    let scene = Scene::set(Limits::default()).await;
    // A TLS record of the largest length there can be, a handshake message of 16 MB, and HTTP/2 without TLS.
    let record = [22, 3, 1, 0xff, 0xff, 1, 0xff, 0xff, 0xff];
    let message = [22, 3, 1, 0x40, 0x00, 1, 0xff, 0xff, 0xff];
    let plain = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x04\x00\x00\x00\x00\x00";
    for bytes in [&record[..], &message, plain] {
        let mut stream = scene.connect().await;
        stream.write_all(bytes).await.unwrap();
        let began = Instant::now();
        // More of it, for as long as anybody listens.
        while stream.write_all(&[0; 4096]).await.is_ok() {
            assert!(
                began.elapsed() < Duration::from_secs(10),
                "it is still listened to"
            );
        }
    }
    // And from somebody who knows the secret.
    let client = scene.client("job", &scene.secret);
    let mut large = impatient("job", "b");
    large.advert.capabilities = (0..5000)
        .map(|number| format!("capability-{number}"))
        .collect();
    let refused = Agent::start(&client, large).await;
    assert!(matches!(
        refused.err(),
        Some(RendezvousError::Unreachable { .. })
    ));
    scene.check_nobody_noticed().await;
}

#[tokio::test]
async fn idle_strangers_keep_nobody_out() {
    let limits = Limits {
        handshakes: 8,
        handshake_within: Duration::from_secs(2),
        ..Limits::default()
    };
    let scene = Scene::set(limits).await;
    let mut idle = Vec::new();
    for _ in 0..100 {
        let mut stream = scene.connect().await;
        let _ = stream.write_all(&[22, 3, 1]).await; // the beginning of a handshake, and no more
        idle.push(stream);
    }
    let client = scene.client("job", &scene.secret);
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
    // All of them are shown out in time.
    let shown_out = futures_util::future::join_all(idle.iter_mut().map(read_to_end));
    tokio::time::timeout(Duration::from_secs(4), shown_out)
        .await
        .expect("some still idle");
    assert_eq!(scene.agent.now(), Decision::Run(scene.place.clone()));
}

#[tokio::test]
async fn more_connections_than_allowed_are_refused() {
    let limits = Limits {
        connections: 1,
        ..Limits::default()
    };
    let scene = Scene::set(limits).await;
    let client = scene.client("job", &scene.secret);
    let refused = Agent::start(&client, impatient("job", "b")).await;
    assert!(matches!(
        refused.err(),
        Some(RendezvousError::Unreachable { .. })
    ));
    scene.check_nobody_noticed().await;
}

#[tokio::test]
async fn a_conversation_that_was_overheard_cannot_be_repeated() {
    let scene = Scene::set(Limits::default()).await;
    let listener = TcpListener::bind(LOOPBACK).await.unwrap();
    let tap = Address {
        host: "127.0.0.1".into(),
        port: listener.local_addr().unwrap().port(),
    };
    let server = scene.server.address();
    let overhear = tokio::spawn(async move {
        let (mut from, _) = listener.accept().await.unwrap();
        let mut to = TcpStream::connect(server).await.unwrap();
        let (mut from_read, mut from_write) = from.split();
        let (mut to_read, mut to_write) = to.split();
        let mut heard = Vec::new();
        let listen = async {
            let mut buffer = [0; 4096];
            loop {
                match from_read.read(&mut buffer).await {
                    Ok(count) if count > 0 => {
                        heard.extend_from_slice(&buffer[..count]);
                        to_write.write_all(&buffer[..count]).await.unwrap();
                    }
                    _ => return,
                }
            }
        };
        tokio::select! {
            () = listen => {}
            _ = tokio::io::copy(&mut to_read, &mut from_write) => {}
        }
        heard
    });
    let client = Client::new(tap, "job", &scene.secret).unwrap();
    let agent = Agent::start(&client, join("job", "b", &policy(1, 2)))
        .await
        .unwrap();
    agent.leave().await;
    let heard = overhear.await.unwrap();
    assert!(heard.len() > 500, "something was said");
    let before = scene.server.traffic();
    let mut stream = scene.connect().await;
    let _ = stream.write_all(&heard).await;
    let _ = stream.shutdown().await;
    read_to_end(&mut stream).await;
    let (letters, _) = scene.server.traffic();
    assert!(
        letters - before.0 <= 2,
        "the agent's own heartbeats and nothing else"
    );
}

#[tokio::test]
async fn only_the_named_address_is_listened_on() {
    let scene = Scene::set(Limits::default()).await;
    let elsewhere = ("127.0.0.2", scene.server.address().port());
    assert!(TcpStream::connect(elsewhere).await.is_err());
}

fn blake3_noise() -> blake3::OutputReader {
    blake3::Hasher::new().update(b"noise").finalize_xof()
}
