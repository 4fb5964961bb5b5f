//! Relays the connection of a local client to the agent that serves the store of the world.
//!
//! Agents connect to each other by TLS with keys of the run secret. The first bytes of a relayed connection are the
//! epoch of its world: a client of an older world never reaches the store of a newer one.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsConnector, client, server};
use trainyard_rendezvous::{Address, Epoch};

/// How long connecting to another agent may take, or reading the epoch of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Relays a connection until one end closes it.
pub async fn relay(
    mut client: TcpStream,
    store: &Address,
    epoch: Epoch,
    tls: Arc<ClientConfig>,
) -> io::Result<()> {
    let connecting = connect(store, epoch, tls);
    let mut server = timeout(CONNECT_TIMEOUT, connecting)
        .await
        .map_err(|_| timed_out())??;
    copy_bidirectional(&mut client, &mut server).await?;
    Ok(())
}

async fn connect(
    store: &Address,
    epoch: Epoch,
    tls: Arc<ClientConfig>,
) -> io::Result<client::TlsStream<TcpStream>> {
    let stream = TcpStream::connect((store.host.as_str(), store.port)).await?;
    stream.set_nodelay(true)?;
    // The server proves a key, not a name.
    let name = ServerName::try_from("trainyard").map_err(io::Error::other)?;
    let mut stream = TlsConnector::from(tls).connect(name, stream).await?;
    stream.write_all(&epoch.0.to_le_bytes()).await?;
    Ok(stream)
}

/// The epoch of a relayed connection.
pub async fn read_epoch(stream: &mut server::TlsStream<TcpStream>) -> io::Result<Epoch> {
    let reading = timeout(CONNECT_TIMEOUT, stream.read_u64_le()).await;
    Ok(Epoch(reading.map_err(|_| timed_out())??))
}

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the other agent does not answer")
}
