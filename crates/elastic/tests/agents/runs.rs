//! Properties of elastic runs that hold with every rendezvous backend.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::etcd::{Etcd, free_port};
use crate::node::{HELLO, Node, Run, WorkerInfo};

/// The rendezvous of a run.
pub struct Rendezvous {
    endpoint: String,
    dir: TempDir,
}

impl Rendezvous {
    /// Our own server, which the first agent starts.
    pub fn server() -> Rendezvous {
        Rendezvous {
            endpoint: format!("127.0.0.1:{}", free_port()),
            dir: TempDir::new().unwrap(),
        }
    }

    pub fn etcd(etcd: &Etcd) -> Rendezvous {
        Rendezvous {
            endpoint: etcd.url.clone(),
            dir: TempDir::new().unwrap(),
        }
    }

    /// Runs a test with the settings that all nodes have in common.
    fn run(
        &self,
        id: &str,
        nodes: (u32, u32),
        restarts: u32,
        script: &str,
        test: impl Fn(&Run<'_>),
    ) {
        let script = format!("{HELLO}{script}");
        test(&Run {
            id,
            endpoint: &self.endpoint,
            secret: &self.dir.path().join("secret"),
            nodes,
            max_restarts: restarts,
            script: &script,
        });
    }
}

fn workers_after(nodes: &[&Node], epoch: u64) -> Vec<WorkerInfo> {
    let workers: Vec<WorkerInfo> = nodes.iter().map(|node| node.worker_after(epoch)).collect();
    let epochs: Vec<u64> = workers.iter().map(|worker| worker.epoch).collect();
    assert!(
        epochs.iter().all(|epoch| *epoch == epochs[0]),
        "{workers:?}"
    );
    assert!(
        workers
            .iter()
            .all(|worker| worker.store == workers[0].store),
        "{workers:?}"
    );
    let mut ranks: Vec<usize> = workers.iter().map(|worker| worker.rank).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, (0..nodes.len()).collect::<Vec<_>>(), "{workers:?}");
    assert!(
        workers.iter().all(|worker| worker.world == nodes.len()),
        "{workers:?}"
    );
    workers
}

/// Starts the nodes of a run. Without etcd the first one serves the rendezvous, so it starts before the others, and
/// tests do not kill it.
fn start<const N: usize>(run: &Run<'_>, nodes: [&str; N]) -> [Node; N] {
    let mut is_first = true;
    nodes.map(|node| {
        let node = Node::start(run, node);
        if std::mem::take(&mut is_first) {
            wait_until_listening(run.endpoint);
        }
        node
    })
}

fn wait_until_listening(endpoint: &str) {
    let began = Instant::now();
    while TcpStream::connect(endpoint.trim_start_matches("http://")).is_err() {
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "no process listens on {endpoint}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A run of three nodes whose workers run forever, after all workers have started.
fn three(run: &Run<'_>) -> ([Node; 3], Vec<WorkerInfo>) {
    let nodes = start(run, ["a", "b", "c"]);
    let workers = workers_after(&[&nodes[0], &nodes[1], &nodes[2]], 0);
    (nodes, workers)
}

pub fn success(rendezvous: &Rendezvous) {
    rendezvous.run("succeeds", (2, 2), 0, "exit 0", |run| {
        let mut nodes = start(run, ["a", "b"]);
        workers_after(&[&nodes[0], &nodes[1]], 0);
        for node in &mut nodes {
            let (code, stderr) = node.wait();
            assert_eq!(code, 0, "{stderr}");
        }
    });
}

pub fn lost_and_back(rendezvous: &Rendezvous) {
    rendezvous.run("loses", (2, 3), 0, "exec sleep 1000", |run| {
        let ([a, b, c], first) = three(run);
        c.kill();
        let began = Instant::now();
        let second = workers_after(&[&a, &b], first[0].epoch);
        println!("a world of two {:?} after the kill", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(20));
        assert_ranks_kept(&first, &second);

        let c = Node::start(run, "c");
        let third = workers_after(&[&a, &b, &c], second[0].epoch);
        assert_eq!(third[0].rank, second[0].rank);
        assert_eq!(third[1].rank, second[1].rank);
        assert_eq!(
            third[0].restarts, 0,
            "a lost node does not count as a restart"
        );
    });
}

/// A survivor keeps its rank if the new world is large enough.
fn assert_ranks_kept(before: &[WorkerInfo], after: &[WorkerInfo]) {
    for (before, after) in before.iter().zip(after) {
        if before.rank < after.world {
            assert_eq!(before.rank, after.rank);
        }
    }
}

pub fn failures(rendezvous: &Rendezvous) {
    // The worker that fails waits until the other has printed its line.
    let dir = rendezvous.dir.path().display();
    let script = format!(
        "touch {dir}/$TRAINYARD_EPOCH-$RANK; [ $RANK = 1 ] || exec sleep 1000; \
         until [ -e {dir}/$TRAINYARD_EPOCH-0 ]; do sleep 0.01; done; echo no data >&2; exit 7"
    );
    rendezvous.run("fails", (2, 2), 1, &script, |run| {
        let mut nodes = start(run, ["a", "b"]);
        let first = workers_after(&[&nodes[0], &nodes[1]], 0);
        let again = workers_after(&[&nodes[0], &nodes[1]], first[0].epoch);
        assert_eq!((first[0].restarts, again[0].restarts), (0, 1));
        let failed = ["a", "b"][again.iter().position(|worker| worker.rank == 1).unwrap()];
        for node in &mut nodes {
            let (code, stderr) = node.wait();
            assert_eq!(code, 1);
            let expected =
                format!("a worker failed on node `{failed}` (restarts used: 1): rank 1 (pid ");
            assert!(stderr.contains(&expected), "{stderr}");
            assert!(stderr.contains("exited with code 7"), "{stderr}");
            assert!(stderr.contains("| no data"), "{stderr}");
        }
    });
}

pub fn leaving(rendezvous: &Rendezvous) {
    let script = "trap 'sleep 0.3; exit 0' TERM; sleep 1000 & wait";
    rendezvous.run("leaves", (2, 3), 0, script, |run| {
        let ([a, b, mut c], first) = three(run);
        c.signal(Signal::TERM);
        let (code, stderr) = c.wait();
        assert_eq!(code, 3, "{stderr}");
        workers_after(&[&a, &b], first[0].epoch);
    });
}

pub fn hung(rendezvous: &Rendezvous) {
    rendezvous.run("hangs", (2, 3), 0, "exec sleep 1000", |run| {
        let ([a, b, c], first) = three(run);
        c.signal(Signal::STOP);
        let second = workers_after(&[&a, &b], first[0].epoch);
        c.signal(Signal::CONT);
        workers_after(&[&a, &b, &c], second[0].epoch);
    });
}

/// With etcd all nodes are equal: the one that hosts the store can be lost.
pub fn store_moves(rendezvous: &Rendezvous) {
    rendezvous.run("moves", (2, 3), 0, "exec sleep 1000", |run| {
        let (nodes, first) = three(run);
        let store_host = first.iter().position(|worker| worker.rank == 0).unwrap();
        let mut left: Vec<Node> = nodes.into();
        left.remove(store_host).kill();
        let second = workers_after(&[&left[0], &left[1]], first[0].epoch);
        assert_ne!(second[0].store, first[0].store);
    });
}
