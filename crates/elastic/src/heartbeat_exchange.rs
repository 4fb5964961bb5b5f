//! Shares the heartbeats of ranks between agents, through the workers' store.
//!
//! Every agent publishes the status of its ranks about once a second. Only an agent whose ranks stall, or which shows
//! metrics of the whole job, reads what the others published. It uses that to describe which rank holds up the job,
//! never to decide which rank to kill.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use trainyard_heartbeat::RankStatus;
use trainyard_rendezvous::RankAssignment;

use crate::store::client_codec;

/// How often an agent publishes.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(1);
/// An agent reads the heartbeats of other nodes once one of its ranks has stalled for this long.
const STALLED_AFTER: Duration = Duration::from_secs(1);
/// How long a request to the store may take; a later round tries again.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// More than the statuses of a node's ranks take.
const MAX_VALUE_BYTES: u64 = 16 << 20;

/// The exchange with the other agents of one world.
pub(crate) struct HeartbeatExchange {
    local: watch::Sender<Vec<RankStatus>>,
    peers: Arc<Mutex<Vec<RankStatus>>>,
    next_publish: Instant,
    task: AbortHandle,
}

impl HeartbeatExchange {
    /// Connects in the background to the store of a world, at this agent's address for local clients. With `needs_all`
    /// it always reads the heartbeats of other nodes.
    pub(crate) fn start(
        assignment: &RankAssignment,
        store: SocketAddr,
        needs_all: bool,
        runtime: &Handle,
    ) -> HeartbeatExchange {
        let (local, published) = watch::channel(Vec::new());
        let peers = Arc::<Mutex<Vec<RankStatus>>>::default();
        let node = Node {
            node_rank: assignment.node_rank,
            num_nodes: assignment.num_nodes,
            store,
            needs_all,
        };
        let task = runtime.spawn(exchange(node, published, Arc::clone(&peers)));
        HeartbeatExchange {
            local,
            peers,
            next_publish: Instant::now(),
            task: task.abort_handle(),
        }
    }

    /// Publishes the status of this node's ranks, if it is time.
    pub(crate) fn publish(&mut self, local: impl FnOnce() -> Vec<RankStatus>, now: Instant) {
        if now >= self.next_publish {
            self.next_publish = now + PUBLISH_INTERVAL;
            self.local.send_replace(local());
        }
    }

    /// The last known status of the ranks of other nodes; empty while they are not needed.
    pub(crate) fn peer_statuses(&self) -> Vec<RankStatus> {
        let peers = self.peers.lock();
        peers.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for HeartbeatExchange {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// This node among those that exchange heartbeats.
struct Node {
    node_rank: u32,
    num_nodes: u32,
    store: SocketAddr,
    /// Whether to read what the other nodes publish also while no local rank stalls.
    needs_all: bool,
}

async fn exchange(
    node: Node,
    mut published: watch::Receiver<Vec<RankStatus>>,
    peers: Arc<Mutex<Vec<RankStatus>>>,
) {
    let mut connection = None;
    while published.changed().await.is_ok() {
        let local = published.borrow_and_update().clone();
        let round = round(&mut connection, &node, &local);
        match tokio::time::timeout(REQUEST_TIMEOUT, round).await {
            Ok(Ok(others)) => {
                *peers.lock().unwrap_or_else(PoisonError::into_inner) = others;
            }
            Ok(Err(_)) | Err(_) => connection = None,
        }
    }
}

/// Publishes the local statuses, and reads those of other nodes if they are needed.
async fn round(
    connection: &mut Option<BufReader<TcpStream>>,
    node: &Node,
    local: &[RankStatus],
) -> io::Result<Vec<RankStatus>> {
    let stream = match connection.take() {
        Some(stream) => stream,
        None => connect(node.store).await?,
    };
    let stream = connection.insert(stream);
    let value = serde_json::to_vec(local).map_err(io::Error::other)?;
    stream
        .write_all(&client_codec::set(&key(node.node_rank), &value))
        .await?;
    let is_stalled = |status: &RankStatus| status.stalled_for >= STALLED_AFTER;
    if !node.needs_all && !local.iter().any(is_stalled) {
        return Ok(Vec::new());
    }
    let others: Vec<Vec<u8>> = (0..node.num_nodes)
        .filter(|other| *other != node.node_rank)
        .map(key)
        .collect();
    Ok(values(stream, &others).await?.concat())
}

async fn connect(store: impl ToSocketAddrs) -> io::Result<BufReader<TcpStream>> {
    let mut stream = BufReader::new(TcpStream::connect(store).await?);
    stream.write_all(&client_codec::hello()).await?;
    Ok(stream)
}

/// The statuses under each of these keys; empty if the key does not exist yet.
async fn values(
    stream: &mut BufReader<TcpStream>,
    keys: &[Vec<u8>],
) -> io::Result<Vec<Vec<RankStatus>>> {
    stream.write_all(&client_codec::multi_get(keys)).await?;
    let mut all = Vec::new();
    for _ in keys {
        let value = read_value(stream).await?;
        all.push(serde_json::from_slice(&value).unwrap_or_default());
    }
    Ok(all)
}

/// The status of all ranks that the agents of a job published, each with its node rank, from the address at which an
/// agent serves local clients. For observers of the job, such as `trainyard top`.
pub fn peer_heartbeats(
    host: &str,
    port: u16,
    num_nodes: usize,
) -> io::Result<Vec<(usize, RankStatus)>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let keys: Vec<Vec<u8>> = (0..num_nodes as u32).map(key).collect();
    runtime.block_on(async {
        let request = async {
            let mut stream = connect((host, port)).await?;
            values(&mut stream, &keys).await
        };
        let values = tokio::time::timeout(REQUEST_TIMEOUT, request).await??;
        let of_node = |(node, statuses): (usize, Vec<RankStatus>)| {
            statuses.into_iter().map(move |status| (node, status))
        };
        Ok(values.into_iter().enumerate().flat_map(of_node).collect())
    })
}

fn key(node: u32) -> Vec<u8> {
    format!("trainyard/heartbeats/{node}").into_bytes()
}

async fn read_value(stream: &mut BufReader<TcpStream>) -> io::Result<Vec<u8>> {
    let length = stream.read_u64_le().await?;
    if length > MAX_VALUE_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut value = Vec::new();
    stream.take(length).read_to_end(&mut value).await?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use trainyard_heartbeat::Heartbeat;

    use super::*;
    use crate::store::tests::{test_assignment, test_stores};

    fn statuses(rank: usize, stalled_for: Duration) -> Vec<RankStatus> {
        let heartbeat = Heartbeat {
            rank,
            ..Heartbeat::default()
        };
        vec![RankStatus {
            heartbeat,
            stalled_for,
            ..RankStatus::default()
        }]
    }

    #[test]
    fn an_agent_whose_ranks_stall_reads_the_heartbeats_of_others() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let stores = test_stores(runtime.handle());
        let start = |node_rank: u32| {
            let store = &stores[node_rank as usize];
            let assignment = test_assignment(node_rank, &stores[0]);
            store.open(&assignment);
            HeartbeatExchange::start(&assignment, store.local_address(), false, runtime.handle())
        };
        let (mut one, mut other) = (start(0), start(1));
        let mut now = Instant::now();
        let deadline = now + Duration::from_secs(20);
        // As the agent's loop does, until the exchange has completed a round.
        while one.peer_statuses().is_empty() {
            assert!(
                Instant::now() < deadline,
                "the status of the other agent never arrived"
            );
            other.publish(|| statuses(1, Duration::ZERO), now);
            one.publish(|| statuses(0, STALLED_AFTER), now);
            now += PUBLISH_INTERVAL;
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(one.peer_statuses()[0].heartbeat.rank, 1);
        let port = stores[1].local_address().port();
        let published = peer_heartbeats("127.0.0.1", port, 2).unwrap();
        let ranks: Vec<(usize, usize)> = published
            .iter()
            .map(|(node, status)| (*node, status.heartbeat.rank))
            .collect();
        assert_eq!(ranks, [(0, 0), (1, 1)]);
        assert!(other.peer_statuses().is_empty(), "its ranks make progress");
    }
}
