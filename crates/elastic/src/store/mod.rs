//! The workers' store: a key-value store for libtorch's `TCPStore` clients, through which workers find each other.
//!
//! It implements the protocol of `TCPStore`, so that our workers and PyTorch's are its clients unchanged
//! (`TORCHELASTIC_USE_AGENT_STORE`). It runs in the agents, so that the exit of a worker does not take it away. Every
//! epoch starts with an empty store: the agent drops the keys and connections of a broken world, and new clients wait
//! until the next world has formed. By then no worker of the old world is alive on any node.
//!
//! `TCPStore` does not authenticate clients, so the store is not reachable over the network. Workers connect to their
//! own agent over loopback, and the agent accepts processes of its user only. One agent of the world serves the keys;
//! the others relay to it by TLS with keys of the run secret.

pub(crate) mod client_codec;
mod connection;
mod kv_map;
mod local_user;
mod memory_limit;
mod relay;
mod wire;

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener as StdListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::server::TlsStream;
use trainyard_rendezvous::{Address, Epoch, RankAssignment, RunSecret};
use trainyard_tls::{Acceptor, Identity, Limits, Service};

use connection::Contents;

/// More than the processes of a worker open.
const CONNECTIONS_PER_WORKER: usize = 64;
/// The delay after a failed accept, for example when the process is out of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(20);

/// This agent's part of the workers' store. Dropping it closes all connections.
#[derive(Debug)]
pub struct WorkerStore {
    local_address: SocketAddr,
    relay_address: SocketAddr,
    epoch: Arc<CurrentEpoch>,
    tasks: [JoinHandle<()>; 2],
}

/// Where clients of the current epoch find their keys. Between epochs there is no route, and clients wait.
#[derive(Debug, Default)]
struct CurrentEpoch(Mutex<watch::Sender<Option<Route>>>);

#[derive(Clone, Debug)]
enum Route {
    /// This agent serves the keys.
    Here(Epoch, Arc<Contents>),
    /// Another agent does.
    Remote(Epoch, Address),
}

impl WorkerStore {
    /// Listens on loopback for the workers of this node, and on `host` for other agents; port 0 is any free one.
    /// Clients wait until the store is [open](Self::open).
    pub fn serve(
        (host, port): (&str, u16),
        (run, secret): (&str, &RunSecret),
        num_workers: usize,
        runtime: &Handle,
    ) -> io::Result<WorkerStore> {
        let identity =
            Identity::new(secret, Service::WorkerStore, run).map_err(io::Error::other)?;
        let client_tls = identity.client_config().map_err(io::Error::other)?;
        let server_tls = identity.server_config().map_err(io::Error::other)?;
        let _entered = runtime.enter();
        let (local, local_address) = listen((Ipv4Addr::LOCALHOST.to_string().as_str(), 0))?;
        let (remote, relay_address) = listen((host, port))?;
        let epoch = Arc::<CurrentEpoch>::default();
        let local_clients = LocalClients {
            address: local_address,
            epoch: Arc::clone(&epoch),
            tls: client_tls,
            slots: Arc::new(Semaphore::new((num_workers + 1) * CONNECTIONS_PER_WORKER)),
        };
        let served = Arc::clone(&epoch);
        let agents =
            Acceptor::new(Limits::default()).run(remote, server_tls, move |stream, from| {
                serve_agent(stream, from, Arc::clone(&served))
            });
        Ok(WorkerStore {
            local_address,
            relay_address,
            epoch,
            tasks: [
                runtime.spawn(local_clients.accept(local)),
                runtime.spawn(agents),
            ],
        })
    }

    /// The address for the workers of this node.
    pub fn local_address(&self) -> SocketAddr {
        self.local_address
    }

    /// The address for other agents.
    pub fn relay_address(&self) -> SocketAddr {
        self.relay_address
    }

    /// Serves the clients of an epoch: those that have connected, and new ones.
    pub fn open(&self, assignment: &RankAssignment) {
        let route = if assignment.hosts_store {
            Route::Here(assignment.epoch, Arc::default())
        } else {
            Route::Remote(assignment.epoch, assignment.store.clone())
        };
        self.epoch.lock().send_replace(Some(route));
    }

    /// Drops all keys and connections. New clients wait until the store is opened again.
    pub fn clear(&self) {
        *self.epoch.lock() = watch::Sender::default();
    }
}

impl Drop for WorkerStore {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        self.clear();
    }
}

impl CurrentEpoch {
    fn lock(&self) -> MutexGuard<'_, watch::Sender<Option<Route>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the store is open and acts on its route, until the store is cleared.
    async fn with_route<F>(&self, act: impl FnOnce(Route) -> F) -> io::Result<()>
    where
        F: Future<Output = io::Result<()>>,
    {
        let mut route = self.lock().subscribe();
        let open = route.wait_for(Option::is_some).await;
        // Clearing the store drops the sender.
        let Some(route_now) = open.ok().and_then(|route| route.clone()) else {
            return Ok(());
        };
        tokio::select! {
            done = act(route_now) => done,
            () = closed(&mut route) => Ok(()),
        }
    }
}

/// Waits until the store is cleared.
async fn closed(route: &mut watch::Receiver<Option<Route>>) {
    while route.changed().await.is_ok() {}
}

fn listen(address: (&str, u16)) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = StdListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((TcpListener::from_std(listener)?, address))
}

/// The clients on this node.
#[derive(Clone)]
struct LocalClients {
    address: SocketAddr,
    epoch: Arc<CurrentEpoch>,
    tls: Arc<ClientConfig>,
    slots: Arc<Semaphore>,
}

impl LocalClients {
    async fn accept(self, listener: TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, from)) => {
                        let clients = self.clone();
                        connections.spawn(async move {
                            let served = clients.serve(stream, from).await;
                            log_rejection(served, from);
                        });
                    }
                    Err(_) => tokio::time::sleep(ACCEPT_RETRY_DELAY).await,
                },
                Some(_) = connections.join_next() => {}
            }
        }
    }

    async fn serve(&self, stream: TcpStream, from: SocketAddr) -> io::Result<()> {
        let Ok(_slot) = self.slots.try_acquire() else {
            return Err(wire::invalid("too many connections".to_owned()));
        };
        local_user::check(from, self.address)?;
        stream.set_nodelay(true)?;
        let act = async |route| match route {
            Route::Here(_, contents) => connection::serve(stream, &contents).await,
            Route::Remote(epoch, store) => {
                relay::relay(stream, &store, epoch, Arc::clone(&self.tls)).await
            }
        };
        self.epoch.with_route(act).await
    }
}

/// Serves a client that another agent relays.
async fn serve_agent(
    mut stream: TlsStream<TcpStream>,
    from: SocketAddr,
    current: Arc<CurrentEpoch>,
) {
    let serve = async {
        let epoch = relay::read_epoch(&mut stream).await?;
        let act = async |route| match route {
            Route::Here(open, contents) if open == epoch => {
                connection::serve(stream, &contents).await
            }
            Route::Here(open, _) => Err(wire::invalid(format!(
                "its world is of {epoch}, this one of {open}"
            ))),
            Route::Remote(..) => Err(wire::invalid("another node has the store".to_owned())),
        };
        current.with_route(act).await
    };
    log_rejection(serve.await, from);
}

/// Serves one client with a store of its own. For fuzzing.
#[doc(hidden)]
pub async fn serve_alone(stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
    connection::serve(stream, &Contents::default()).await
}

/// Clients that disconnect are no news; those that the store rejects are.
fn log_rejection(served: io::Result<()>, from: SocketAddr) {
    use io::ErrorKind::{InvalidData, PermissionDenied, TimedOut};
    if let Err(error) = served
        && matches!(error.kind(), InvalidData | PermissionDenied | TimedOut)
    {
        tracing::warn!(%from, %error, "the workers' store rejected a client");
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::TcpStream;

    use tokio::runtime::Runtime;

    use super::*;

    const HELLO: &[u8] = b"\0\xce\xf7\x85\x3c\r\xe1\x10\0\0";

    /// The stores of two agents of a run.
    pub(crate) fn test_stores(runtime: &Handle) -> [WorkerStore; 2] {
        let secret = RunSecret::random().unwrap();
        let store = || WorkerStore::serve(("127.0.0.1", 0), ("run", &secret), 1, runtime).unwrap();
        [store(), store()]
    }

    /// The assignment of one of two nodes; the first one has the store.
    pub(crate) fn test_assignment(node_rank: u32, store: &WorkerStore) -> RankAssignment {
        RankAssignment {
            epoch: Epoch(1),
            node_rank,
            num_nodes: 2,
            first_rank: node_rank,
            world_size: 2,
            restarts: 0,
            store: Address {
                host: "127.0.0.1".into(),
                port: store.relay_address().port(),
            },
            hosts_store: node_rank == 0,
        }
    }

    fn runtime() -> Runtime {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).enable_all().build().unwrap()
    }

    fn connect(store: &WorkerStore) -> TcpStream {
        let mut stream = TcpStream::connect(store.local_address()).unwrap();
        assert_eq!(request(&mut stream, HELLO, 4), b"\xe1\x10\0\0");
        stream
    }

    fn request(stream: &mut TcpStream, query: &[u8], length: usize) -> Vec<u8> {
        stream.write_all(query).unwrap();
        let mut response = vec![0; length];
        stream.read_exact(&mut response).unwrap();
        response
    }

    /// Whether the store has closed a connection.
    fn is_closed(stream: &mut TcpStream) -> bool {
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        match stream.read(&mut [0; 1]) {
            Ok(length) => length == 0,
            Err(error) => error.kind() != ErrorKind::WouldBlock,
        }
    }

    #[test]
    fn clients_of_two_agents_share_keys_until_the_store_is_cleared() {
        let runtime = runtime();
        let stores = test_stores(runtime.handle());
        for (node, store) in stores.iter().enumerate() {
            store.open(&test_assignment(node as u32, &stores[0]));
        }
        let (mut one, mut other) = (connect(&stores[0]), connect(&stores[1]));
        let wait = b"\x06\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0k";
        one.write_all(wait).unwrap();
        other
            .write_all(b"\x01\x01\0\0\0\0\0\0\0k\x02\0\0\0\0\0\0\0vw")
            .unwrap();
        assert_eq!(request(&mut one, b"", 1), [0]);
        let get = b"\x03\x01\0\0\0\0\0\0\0k";
        for client in [&mut one, &mut other] {
            assert_eq!(request(client, get, 10), b"\x02\0\0\0\0\0\0\0vw");
        }
        let wait_and_cancel = b"\x06\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0z\x0c";
        assert_eq!(request(&mut one, wait_and_cancel, 1), [1]);

        stores[0].clear();
        assert!(is_closed(&mut one) && is_closed(&mut other));
        let mut next = TcpStream::connect(stores[0].local_address()).unwrap();
        next.write_all(b"\0\xce\xf7\x85\x3c\x07").unwrap();
        next.set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        assert!(
            next.read(&mut [0; 1]).is_err(),
            "it must wait until the store is open"
        );
        stores[0].open(&test_assignment(0, &stores[0]));
        next.set_read_timeout(None).unwrap();
        assert_eq!(request(&mut next, b"", 8), [0; 8], "the keys are gone");
    }

    #[test]
    fn a_client_of_an_older_world_does_not_reach_the_store() {
        let runtime = runtime();
        let stores = test_stores(runtime.handle());
        let mut newer = test_assignment(0, &stores[0]);
        newer.epoch = Epoch(2);
        stores[0].open(&newer);
        stores[1].open(&test_assignment(1, &stores[0]));
        let mut stale = TcpStream::connect(stores[1].local_address()).unwrap();
        let _ = stale.write_all(HELLO);
        assert!(is_closed(&mut stale));
    }

    /// Neither the protocol of the workers nor a foreign secret opens the address for agents.
    #[test]
    fn only_agents_of_the_run_reach_the_store_over_the_network() {
        let runtime = runtime();
        let stores = test_stores(runtime.handle());
        stores[0].open(&test_assignment(0, &stores[0]));
        let mut plain = TcpStream::connect(stores[0].relay_address()).unwrap();
        let _ = plain.write_all(HELLO);
        // TLS answers with an alert before it closes.
        let mut alert = Vec::new();
        plain
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let _ = plain.read_to_end(&mut alert);
        assert!(!alert.ends_with(b"\xe1\x10\0\0"), "{alert:?}");
        let [foreign, _] = test_stores(runtime.handle());
        foreign.open(&test_assignment(1, &stores[0]));
        let mut client = TcpStream::connect(foreign.local_address()).unwrap();
        let _ = client.write_all(HELLO);
        assert!(is_closed(&mut client));
    }

    /// 60 bytes that request 60 MiB many times over, from clients that do not read.
    #[test]
    fn greedy_clients_are_rejected() {
        let runtime = runtime();
        let [store, _] = test_stores(runtime.handle());
        store.open(&test_assignment(0, &store));
        let mut writer = connect(&store);
        let mut set = b"\x01\x01\0\0\0\0\0\0\0k".to_vec();
        set.extend((60u64 << 20).to_le_bytes());
        set.resize(set.len() + (60 << 20), 7);
        writer.write_all(&set).unwrap();
        assert_eq!(request(&mut writer, b"\x07", 8), 1u64.to_le_bytes());
        let mut multi_get = b"\x0a\x05\0\0\0\0\0\0\0".to_vec();
        multi_get.extend(b"\x01\0\0\0\0\0\0\0k".repeat(5));
        let mut greedy = connect(&store);
        greedy.write_all(&multi_get).unwrap();
        assert!(is_closed(&mut greedy));
        let mut silent = connect(&store);
        silent.write_all(b"\x05").unwrap();
        drop(silent);
        let many: Vec<TcpStream> = (0..3 * CONNECTIONS_PER_WORKER)
            .map(|_| TcpStream::connect(store.local_address()).unwrap())
            .collect();
        let open = many.into_iter().map(|mut stream| {
            let _ = stream.write_all(HELLO);
            let mut response = [0; 4];
            stream.read_exact(&mut response).is_ok()
        });
        let open: Vec<bool> = open.collect();
        assert!(!open.iter().all(|is_open| *is_open));
    }
}
