//! The workers' store: a server for libtorch's `TCPStore` clients, through which workers find each other.
//!
//! It implements the protocol of `TCPStore`, so that our workers and PyTorch's are its clients unchanged
//! (`TORCHELASTIC_USE_AGENT_STORE`). It runs in the agent, so that the exit of a worker does not take it away. Every
//! epoch starts with an empty store: the agent drops the keys and connections of a broken world, and new clients wait
//! until the next world has formed. By then no worker of the old world is alive on any node.
//!
//! Like `TCPStore` it does not authenticate clients: any process that reaches its address can read and write.

pub(crate) mod client_codec;
mod connection;
mod kv_map;
mod wire;

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};

use kv_map::KvMap;

/// A `TCPStore` server. Dropping it stops it.
#[derive(Debug)]
pub struct TcpStoreServer {
    address: SocketAddr,
    epoch: Arc<Mutex<EpochState>>,
    accept_task: JoinHandle<()>,
}

/// The keys and connections of one epoch.
#[derive(Debug, Default)]
struct EpochState {
    map: Arc<KvMap>,
    is_open: watch::Sender<bool>,
    connections: Vec<AbortHandle>,
}

impl TcpStoreServer {
    /// Listens on an address of this node; port 0 is any free one. Clients wait until the store is
    /// [open](Self::open).
    pub fn serve(host: &str, port: u16, runtime: &Handle) -> io::Result<TcpStoreServer> {
        let listener = StdListener::bind((host, port))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let epoch = Arc::<Mutex<EpochState>>::default();
        let _entered = runtime.enter();
        let listener = TcpListener::from_std(listener)?;
        let accept_task = runtime.spawn(accept(listener, Arc::clone(&epoch)));
        Ok(TcpStoreServer {
            address,
            epoch,
            accept_task,
        })
    }

    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves the clients that have connected, and new ones.
    pub fn open(&self) {
        lock(&self.epoch).is_open.send_replace(true);
    }

    /// Drops all keys and connections. New clients wait until the store is opened again.
    pub fn clear(&self) {
        let epoch = std::mem::take(&mut *lock(&self.epoch));
        for connection in epoch.connections {
            connection.abort();
        }
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.accept_task.abort();
        self.clear();
    }
}

fn lock(epoch: &Mutex<EpochState>) -> MutexGuard<'_, EpochState> {
    epoch.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: TcpListener, epoch: Arc<Mutex<EpochState>>) {
    loop {
        let Ok((stream, from)) = listener.accept().await else {
            // Out of file descriptors, or the client is gone: keep serving others.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        let mut epoch = lock(&epoch);
        let map = Arc::clone(&epoch.map);
        let mut opening = epoch.is_open.subscribe();
        let connection = tokio::spawn(async move {
            // Clearing the store drops the sender, and aborts this task.
            let _ = opening.wait_for(|is_open| *is_open).await;
            let _ = stream.set_nodelay(true);
            if let Err(error) = connection::serve(stream, &map).await
                && error.kind() == io::ErrorKind::InvalidData
            {
                tracing::warn!(%from, %error, "store: rejected a client");
            }
        });
        epoch
            .connections
            .retain(|connection| !connection.is_finished());
        epoch.connections.push(connection.abort_handle());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    fn connect(store: &TcpStoreServer) -> TcpStream {
        let mut stream = TcpStream::connect(store.address()).unwrap();
        let hello = b"\0\xce\xf7\x85\x3c\r\xe1\x10\0\0";
        assert_eq!(request(&mut stream, hello, 4), b"\xe1\x10\0\0");
        stream
    }

    fn request(stream: &mut TcpStream, query: &[u8], length: usize) -> Vec<u8> {
        stream.write_all(query).unwrap();
        let mut response = vec![0; length];
        stream.read_exact(&mut response).unwrap();
        response
    }

    #[test]
    fn clients_share_keys_until_the_store_is_cleared() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let store = TcpStoreServer::serve("127.0.0.1", 0, runtime.handle()).unwrap();
        store.open();
        let (mut one, mut other) = (connect(&store), connect(&store));
        let wait = b"\x06\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0k";
        one.write_all(wait).unwrap();
        other
            .write_all(b"\x01\x01\0\0\0\0\0\0\0k\x02\0\0\0\0\0\0\0vw")
            .unwrap();
        assert_eq!(request(&mut one, b"", 1), [0]);
        let get = b"\x03\x01\0\0\0\0\0\0\0k";
        assert_eq!(request(&mut one, get, 10), b"\x02\0\0\0\0\0\0\0vw");
        assert_eq!(
            request(
                &mut one,
                b"\x06\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0z\x0c",
                1
            ),
            [1]
        );

        store.clear();
        assert_eq!(
            one.read(&mut [0; 1]).unwrap_or(0),
            0,
            "the server closes its connection"
        );
        let mut next = TcpStream::connect(store.address()).unwrap();
        next.write_all(b"\0\xce\xf7\x85\x3c\x07").unwrap();
        next.set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        assert!(
            next.read(&mut [0; 1]).is_err(),
            "it must wait until the store is open"
        );
        store.open();
        next.set_read_timeout(None).unwrap();
        assert_eq!(request(&mut next, b"", 8), [0; 8]);
    }
}
