//! The rendezvous backend of a run: our own server, perhaps embedded in this agent, or etcd.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use trainyard_rendezvous::etcd::{Cluster, ClusterTls, ClusterUser, Etcd};
use trainyard_rendezvous::server::{Client, Limits, Server, serve};
use trainyard_rendezvous::{Address, Backend, RendezvousError, RunSecret};

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The rendezvous backend of a run.
#[derive(Clone, Debug)]
pub enum RendezvousConfig {
    /// Our own server. If the address belongs to this node and is free, this agent starts the server.
    Server(Address),
    /// An etcd cluster.
    Etcd {
        /// Its members, such as `http://host:2379`.
        members: Vec<String>,
        /// TLS certificates, for `https`.
        tls: Option<ClusterTls>,
        /// The user, if the cluster has users.
        user: Option<ClusterUser>,
    },
}

/// A connected backend.
pub(crate) struct Connected {
    pub backend: Arc<dyn Backend>,
    pub server: Option<EmbeddedServer>,
}

/// A rendezvous server in this agent. Its record is temporary: agents that reconnect to a new server know which
/// epochs were used.
pub(crate) struct EmbeddedServer {
    server: Server,
    _record: TempDir,
}

impl RendezvousConfig {
    pub(crate) async fn connect(
        &self,
        run: &str,
        secret: &RunSecret,
    ) -> Result<Connected, RendezvousError> {
        match self {
            RendezvousConfig::Server(address) => Ok(Connected {
                server: serve_if_local(address, run, secret).await?,
                backend: Arc::new(Client::new(address.clone(), run, secret)?),
            }),
            RendezvousConfig::Etcd { members, tls, user } => {
                let cluster = Cluster::new(members, tls.as_ref())?.with_user(user.clone());
                Ok(Connected {
                    backend: Arc::new(Etcd::new(Arc::new(cluster), run, secret)),
                    server: None,
                })
            }
        }
    }
}

impl EmbeddedServer {
    /// Returns when every agent has disconnected, or after `timeout`: all agents must learn the outcome of the run.
    pub(crate) async fn wait_until_disconnected(&self, timeout: Duration) {
        let all_disconnected = async {
            while self.server.num_connected() > 0 {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        let _ = tokio::time::timeout(timeout, all_disconnected).await;
    }
}

/// Starts a server if the address belongs to this node and is free.
async fn serve_if_local(
    address: &Address,
    run: &str,
    secret: &RunSecret,
) -> Result<Option<EmbeddedServer>, RendezvousError> {
    let Some(free) = free_local_address(address) else {
        return Ok(None);
    };
    let record = TempDir::new().map_err(|error| RendezvousError::RecordWrite {
        path: std::env::temp_dir().display().to_string(),
        cause: error.to_string(),
    })?;
    let file = record.path().join("record");
    match serve(free, run, secret, &file, Limits::default()).await {
        Ok(server) => {
            tracing::info!("serving the rendezvous of run {run} at {free}");
            Ok(Some(EmbeddedServer {
                server,
                _record: record,
            }))
        }
        // Another agent on this node was faster.
        Err(RendezvousError::Serve { .. }) if free_local_address(address).is_none() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The socket address, if it belongs to this node and no process listens on it.
fn free_local_address(address: &Address) -> Option<SocketAddr> {
    let mut resolved = (address.host.as_str(), address.port)
        .to_socket_addrs()
        .ok()?;
    resolved.find(|address| match TcpListener::bind(address) {
        Ok(_) => true,
        Err(error) => {
            let expected = [ErrorKind::AddrInUse, ErrorKind::AddrNotAvailable];
            if !expected.contains(&error.kind()) {
                tracing::warn!("cannot serve the rendezvous at {address}: {error}");
            }
            false
        }
    })
}
