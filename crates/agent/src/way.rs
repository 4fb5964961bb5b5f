//! The way to a run: a server, perhaps this agent's own, or etcd.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use trainyard_rendezvous::etcd::{Cluster, ClusterTls, Etcd};
use trainyard_rendezvous::server::{Client, Limits, Server, serve};
use trainyard_rendezvous::{Address, Backend, RendezvousError, Secret};

const GLANCE: Duration = Duration::from_millis(20);

/// Where the agents of a run meet.
#[derive(Clone, Debug)]
pub enum Way {
    /// At a server. If the address is this machine's own and nobody serves there, this agent does.
    Server(Address),
    /// In etcd.
    Etcd {
        /// Its members, as `http://host:2379`.
        members: Vec<String>,
        /// What TLS needs, for `https`.
        tls: Option<ClusterTls>,
    },
}

/// A way that is open.
pub(crate) struct Opened {
    pub backend: Arc<dyn Backend>,
    pub served: Option<Served>,
}

/// A server of this agent's own. Its record goes with it: agents that come back know which epochs were used.
pub(crate) struct Served {
    server: Server,
    _record: TempDir,
}

impl Way {
    pub(crate) async fn open(&self, run: &str, secret: &Secret) -> Result<Opened, RendezvousError> {
        match self {
            Way::Server(address) => Ok(Opened {
                served: serve_here(address, run, secret).await?,
                backend: Arc::new(Client::new(address.clone(), run, secret)?),
            }),
            Way::Etcd { members, tls } => {
                let cluster = Cluster::new(members, tls.as_ref())?;
                Ok(Opened {
                    backend: Arc::new(Etcd::new(Arc::new(cluster), run, secret)),
                    served: None,
                })
            }
        }
    }
}

impl Served {
    /// Returns when every agent has gone, or after `patience`: whoever is left must hear how the run ended.
    pub(crate) async fn emptied(&self, patience: Duration) {
        let all_gone = async {
            while self.server.num_connected() > 0 {
                tokio::time::sleep(GLANCE).await;
            }
        };
        let _ = tokio::time::timeout(patience, all_gone).await;
    }
}

/// Serves if the address is this machine's own and free.
async fn serve_here(
    address: &Address,
    run: &str,
    secret: &Secret,
) -> Result<Option<Served>, RendezvousError> {
    let Some(free) = free_here(address) else {
        return Ok(None);
    };
    let record = TempDir::new().map_err(|error| RendezvousError::Disk {
        path: std::env::temp_dir().display().to_string(),
        cause: error.to_string(),
    })?;
    let file = record.path().join("record");
    match serve(free, run, secret, &file, Limits::default()).await {
        Ok(server) => {
            tracing::info!("serving the rendezvous of run {run} at {free}");
            Ok(Some(Served {
                server,
                _record: record,
            }))
        }
        // Another agent of this machine was faster.
        Err(RendezvousError::Serve { .. }) if free_here(address).is_none() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The socket address, if it is this machine's own and nobody listens there.
fn free_here(address: &Address) -> Option<SocketAddr> {
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
