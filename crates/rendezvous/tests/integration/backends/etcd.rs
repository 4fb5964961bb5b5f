//! The etcd backend, with real etcd processes on loopback.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use trainyard_rendezvous::etcd::{Cluster, ClusterUser, Etcd, Kv, Put, Range};
use trainyard_rendezvous::{Backend, Decision, Epoch, FORMAT_VERSION, RendezvousError, RunSecret};

use super::agent::{Agent, join, policy};
use super::record::RECORD_0213A85;
use super::suite::{BackendFactory, every_backend};

/// The members of an etcd cluster. They end with the test.
struct Members {
    children: Vec<Child>,
    urls: Vec<String>,
    _dir: tempfile::TempDir,
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
    /// Starts a cluster. Returns `None` and prints a message if etcd is not installed.
    async fn start(count: usize, test: &str) -> Option<Members> {
        if Command::new("etcd").arg("--version").output().is_err() {
            eprintln!("skipped: {test} (etcd is not installed: apt-get install etcd-server)");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let ports: Vec<_> = (0..count).map(|_| (free_port(), free_port())).collect();
        let peer = |(at, (_, port)): (usize, &(u16, u16))| format!("m{at}=http://127.0.0.1:{port}");
        let all = ports
            .iter()
            .enumerate()
            .map(peer)
            .collect::<Vec<_>>()
            .join(",");
        let start = |(at, &(client, peer)): (usize, &(u16, u16))| {
            member(dir.path(), at, client, peer, &all)
        };
        let members = Members {
            children: ports.iter().enumerate().map(start).collect(),
            urls: ports
                .iter()
                .map(|(port, _)| format!("http://127.0.0.1:{port}"))
                .collect(),
            _dir: dir,
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
                "etcd did not start: {error}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Adds the user `root` with a password, and enables authentication: requests without it are rejected.
    fn enable_users(&self, password: &str) {
        let post = |path: &str, body: &str| {
            let output = Command::new("curl")
                .args(["-sf", "-X", "POST", "-d", body])
                .arg(format!("{}/v3/auth/{path}", self.urls[0]))
                .output()
                .expect("curl is installed");
            assert!(output.status.success(), "{path}: {output:?}");
        };
        post(
            "user/add",
            &format!(r#"{{"name": "root", "password": "{password}"}}"#),
        );
        post("role/add", r#"{"name": "root"}"#);
        post("user/grant", r#"{"user": "root", "role": "root"}"#);
        post("enable", "{}");
    }

    /// The index of the member that reports itself as the leader.
    async fn leader(&self) -> usize {
        for (at, url) in self.urls.iter().enumerate() {
            let output = tokio::process::Command::new("curl")
                .args(["-s", "-X", "POST", "-d", "{}"])
                .arg(format!("{url}/v3/maintenance/status"))
                .output()
                .await
                .expect("curl is installed");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let field = |name: &str| {
                let rest = text.split(&format!("\"{name}\":\"")).nth(1)?;
                rest.split('"').next().map(str::to_owned)
            };
            if field("leader").is_some() && field("leader") == field("member_id") {
                return at;
            }
        }
        panic!("no member reports itself as the leader");
    }
}

fn member(dir: &Path, at: usize, client: u16, peer: u16, all: &str) -> Child {
    let (client, peer) = (
        format!("http://127.0.0.1:{client}"),
        format!("http://127.0.0.1:{peer}"),
    );
    Command::new("etcd")
        .args(["--name", &format!("m{at}"), "--initial-cluster", all])
        .arg("--data-dir")
        .arg(dir.join(format!("m{at}")))
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
        .expect("etcd is installed")
}

struct EtcdFactory {
    cluster: Arc<Cluster>,
}

#[async_trait]
impl BackendFactory for EtcdFactory {
    async fn open(&self, run: &str) -> Arc<dyn Backend> {
        Arc::new(Etcd::new(
            Arc::clone(&self.cluster) as Arc<dyn Kv>,
            run,
            &RunSecret::random().unwrap(),
        ))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_passes_the_backend_suite() {
    let Some(members) = Members::start(1, "etcd with one member").await else {
        return;
    };
    let cluster = members.cluster();
    every_backend(&EtcdFactory { cluster }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_with_three_members_passes_the_backend_suite_and_survives_the_loss_of_its_leader() {
    let Some(mut members) = Members::start(3, "etcd with three members").await else {
        return;
    };
    let cluster = members.cluster();
    every_backend(&EtcdFactory { cluster }).await;

    let secret = RunSecret::random().unwrap();
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
    let epoch = a.assignment_after(Epoch(0)).await.epoch;

    let leader = members.leader().await;
    members.children[leader].kill().unwrap();
    members.children[leader].wait().unwrap();
    tokio::time::sleep(2 * policy.lease).await;
    for agent in [&a, &b, &c] {
        assert!(
            matches!(agent.now(), Decision::Run(assignment) if assignment.epoch == epoch),
            "{:?}",
            agent.now()
        );
    }
    // The remaining members still serve: the loss of an agent forms a new world.
    c.kill();
    assert!(a.assignment_after(epoch).await.epoch > epoch);
    assert_eq!(a.assignment_after(epoch).await.num_nodes, 2);
}

#[tokio::test]
async fn a_client_of_etcd_without_the_secret_controls_nothing() {
    let Some(members) = Members::start(1, "values of clients without the secret").await else {
        return;
    };
    let cluster = members.cluster();
    let backend = Etcd::new(members.cluster(), "job", &RunSecret::random().unwrap());
    let agent = Agent::start(&backend, join("job", "a", &policy(1, 2)))
        .await
        .unwrap();
    let epoch = agent.assignment_after(Epoch(0)).await.epoch;

    let intruder = Etcd::new(members.cluster(), "job", &RunSecret::random().unwrap());
    let mut impatient = policy(1, 2);
    impatient.join_timeout = Duration::from_secs(1);
    let rejected = Agent::start(&intruder, join("job", "b", &impatient)).await;
    let error = rejected.err().expect("the secret differs").to_string();
    assert!(error.contains("secret"), "{error}");
    for (key, value) in [
        ("agents/c", "{}"),
        ("rejections/a", "x"),
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
    assert!(matches!(agent.now(), Decision::Run(assignment) if assignment.epoch == epoch));
}

/// Signs a value as commit 0213a85 did, which had no format version.
fn sign_0213a85(secret: &RunSecret, run: &str, key: &str, json: &str) -> Vec<u8> {
    let mac_key = secret.derive_key("trainyard rendezvous 1 etcd values", run);
    let mut hasher = blake3::Hasher::new_keyed(&mac_key);
    hasher.update(&(key.len() as u64).to_le_bytes());
    hasher.update(key.as_bytes());
    hasher.update(json.as_bytes());
    format!("{}\n{json}", hasher.finalize().to_hex()).into_bytes()
}

#[tokio::test]
async fn a_record_in_etcd_without_a_format_version_is_rejected() {
    let Some(members) = Members::start(1, "an old record in etcd").await else {
        return;
    };
    let secret = RunSecret::random().unwrap();
    let key = "trainyard/job/record";
    let put = Put {
        key: key.into(),
        value: sign_0213a85(&secret, "job", key, RECORD_0213A85),
        lease: None,
    };
    let old = vec![put];
    members.cluster().put_if(Vec::new(), old).await.unwrap();
    let backend = Etcd::new(members.cluster(), "job", &secret);
    let joined = Agent::start(&backend, join("job", "a", &policy(1, 2))).await;
    let error = joined.err().expect("the record cannot be read");
    assert!(
        matches!(
            &error,
            RendezvousError::FormatVersion { what, found: 1, supported, .. }
                if what.contains(key) && *supported == FORMAT_VERSION
        ),
        "{error:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_with_users_serves_only_them() {
    let Some(members) = Members::start(1, "a_cluster_with_users_serves_only_them").await else {
        return;
    };
    members.enable_users("right");
    let cluster = |password: Option<&str>| {
        let user = password.map(|password| ClusterUser {
            name: "root".to_owned(),
            password: password.to_owned(),
        });
        Cluster::new(&members.urls, None).unwrap().with_user(user)
    };
    for stranger in [None, Some("wrong")] {
        let read = cluster(stranger).get(Range::Key("any".into())).await;
        assert!(read.is_err(), "{stranger:?}");
    }
    let user = Arc::new(cluster(Some("right")));
    user.get(Range::Key("any".into())).await.unwrap();
    let secret = RunSecret::random().unwrap();
    let etcd = Etcd::new(user, "run", &secret);
    let membership = etcd.join(join("run", "a", &policy(1, 1))).await.unwrap();
    let decision = tokio::time::timeout(Duration::from_secs(20), async {
        loop {
            if let decision @ Decision::Run(_) = membership.next().await.unwrap() {
                return decision;
            }
        }
    });
    assert!(
        decision.await.is_ok(),
        "leases and watches have the token too"
    );
}
