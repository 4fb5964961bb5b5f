//! etcd: real members, as processes on loopback.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use trainyard_rendezvous::etcd::{Cluster, Etcd, Kv, Put, Range};
use trainyard_rendezvous::{Backend, Decision, Epoch, Secret};

use crate::agent::{Agent, join, policy};
use crate::suite::{Venue, every_backend};

/// Members that end with the test.
struct Members {
    children: Vec<Child>,
    urls: Vec<String>,
    _folder: tempfile::TempDir,
}

impl Drop for Members {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

impl Members {
    /// `None`, and a word about it, where there is no etcd.
    async fn start(count: usize, test: &str) -> Option<Members> {
        if Command::new("etcd").arg("--version").output().is_err() {
            eprintln!("skipped: {test} (no program `etcd`: apt-get install etcd-server)");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let ports: Vec<_> = (0..count).map(|_| (free_port(), free_port())).collect();
        let peer = |(at, (_, port)): (usize, &(u16, u16))| format!("m{at}=http://127.0.0.1:{port}");
        let all = ports
            .iter()
            .enumerate()
            .map(peer)
            .collect::<Vec<_>>()
            .join(",");
        let start = |(at, &(client, peer)): (usize, &(u16, u16))| {
            member(folder.path(), at, client, peer, &all)
        };
        let members = Members {
            children: ports.iter().enumerate().map(start).collect(),
            urls: ports
                .iter()
                .map(|(port, _)| format!("http://127.0.0.1:{port}"))
                .collect(),
            _folder: folder,
        };
        members.wait().await;
        Some(members)
    }

    fn cluster(&self) -> Arc<Cluster> {
        Arc::new(Cluster::new(&self.urls, None).unwrap())
    }

    async fn wait(&self) {
        let cluster = self.cluster();
        let began = Instant::now();
        while let Err(error) = cluster.get(Range::Key("any".into())).await {
            assert!(
                began.elapsed() < Duration::from_secs(30),
                "etcd does not start: {error}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Which member leads, as each says of itself.
    async fn leader(&self) -> usize {
        for (at, url) in self.urls.iter().enumerate() {
            let output = tokio::process::Command::new("curl")
                .args(["-s", "-X", "POST", "-d", "{}"])
                .arg(format!("{url}/v3/maintenance/status"))
                .output()
                .await
                .expect("curl is there");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let field = |name: &str| {
                let rest = text.split(&format!("\"{name}\":\"")).nth(1)?;
                rest.split('"').next().map(str::to_owned)
            };
            if field("leader").is_some() && field("leader") == field("member_id") {
                return at;
            }
        }
        panic!("nobody leads");
    }
}

fn member(folder: &Path, at: usize, client: u16, peer: u16, all: &str) -> Child {
    let (client, peer) = (
        format!("http://127.0.0.1:{client}"),
        format!("http://127.0.0.1:{peer}"),
    );
    Command::new("etcd")
        .args(["--name", &format!("m{at}"), "--initial-cluster", all])
        .arg("--data-dir")
        .arg(folder.join(format!("m{at}")))
        .args([
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
        ])
        .args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ])
        .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("etcd starts")
}

struct Runs {
    cluster: Arc<Cluster>,
}

#[async_trait]
impl Venue for Runs {
    async fn open(&self, run: &str) -> Arc<dyn Backend> {
        Arc::new(Etcd::new(
            Arc::clone(&self.cluster) as Arc<dyn Kv>,
            run,
            &Secret::random().unwrap(),
        ))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_does_what_every_backend_must() {
    let Some(members) = Members::start(1, "etcd with one member").await else {
        return;
    };
    let cluster = members.cluster();
    every_backend(&Runs { cluster }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_with_three_members_does_too_and_a_dead_leader_disturbs_nobody() {
    let Some(mut members) = Members::start(3, "etcd with three members").await else {
        return;
    };
    let cluster = members.cluster();
    every_backend(&Runs { cluster }).await;

    let secret = Secret::random().unwrap();
    let backend = Etcd::new(members.cluster(), "job", &secret);
    let mut policy = policy(2, 3);
    policy.lease = Duration::from_secs(6);
    let a = Agent::start(&backend, join("job", "a", &policy))
        .await
        .unwrap();
    let b = Agent::start(&backend, join("job", "b", &policy))
        .await
        .unwrap();
    let c = Agent::start(&backend, join("job", "c", &policy))
        .await
        .unwrap();
    let epoch = a.place_after(Epoch(0)).await.epoch;

    let leader = members.leader().await;
    members.children[leader].kill().unwrap();
    members.children[leader].wait().unwrap();
    tokio::time::sleep(2 * policy.lease).await;
    for agent in [&a, &b, &c] {
        assert!(
            matches!(agent.now(), Decision::Run(place) if place.epoch == epoch),
            "{:?}",
            agent.now()
        );
    }
    // And those who are left still decide.
    c.kill();
    assert!(a.place_after(epoch).await.epoch > epoch);
    assert_eq!(a.place_after(epoch).await.num_nodes, 2);
}

#[tokio::test]
async fn whoever_writes_to_etcd_without_the_secret_steers_nobody() {
    let Some(members) = Members::start(1, "strangers in etcd").await else {
        return;
    };
    let cluster = members.cluster();
    let backend = Etcd::new(members.cluster(), "job", &Secret::random().unwrap());
    let agent = Agent::start(&backend, join("job", "a", &policy(1, 2)))
        .await
        .unwrap();
    let epoch = agent.place_after(Epoch(0)).await.epoch;

    let stranger = Etcd::new(members.cluster(), "job", &Secret::random().unwrap());
    let mut impatient = policy(1, 2);
    impatient.join_timeout = Duration::from_secs(1);
    let refused = Agent::start(&stranger, join("job", "b", &impatient)).await;
    let error = refused.err().expect("the secret is wrong").to_string();
    assert!(error.contains("secret"), "{error}");
    for (key, value) in [
        ("agents/c", "{}"),
        ("refusals/a", "x"),
        ("record", "{\"phase\":\"Closed\"}"),
    ] {
        let put = Put {
            key: format!("trainyard/job/{key}"),
            value: value.into(),
            lease: None,
        };
        cluster.put_if(Vec::new(), vec![put]).await.unwrap();
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(matches!(agent.now(), Decision::Run(place) if place.epoch == epoch));
}
