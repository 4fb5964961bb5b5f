//! The workers' store: where they find each other.
//!
//! It speaks the protocol of libtorch's `TCPStore`, so that our workers and PyTorch's are its clients
//! unchanged (`TORCHELASTIC_USE_AGENT_STORE`), and it lives in the agent, so that no worker takes it along.
//! It listens on the named address and no other. Every epoch begins with an empty one: what is left of
//! a broken world is dropped, connections and all, and whoever comes then waits at the door until the next
//! world is there. By that time no worker of the last one is alive on any machine.
//!
//! Like `TCPStore` it knows no secret: whoever reaches the address can read and write.

pub(crate) mod ask;
mod client;
mod shelf;
mod wire;

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};

use shelf::Shelf;

/// A store that serves until it is dropped.
#[derive(Debug)]
pub struct Store {
    address: SocketAddr,
    room: Arc<Mutex<Room>>,
    door: JoinHandle<()>,
}

/// What belongs to one epoch.
#[derive(Debug, Default)]
struct Room {
    shelf: Arc<Shelf>,
    is_open: watch::Sender<bool>,
    guests: Vec<AbortHandle>,
}

impl Store {
    /// Listens at this host; port 0 is any free one. It is closed.
    pub fn serve(host: &str, port: u16, runtime: &Handle) -> io::Result<Store> {
        let listener = StdListener::bind((host, port))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let room = Arc::<Mutex<Room>>::default();
        let _entered = runtime.enter();
        let listener = TcpListener::from_std(listener)?;
        let door = runtime.spawn(accept(listener, Arc::clone(&room)));
        Ok(Store {
            address,
            room,
            door,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves those who came, and those who come.
    pub fn open(&self) {
        lock(&self.room).is_open.send_replace(true);
    }

    /// Forgets everything, and whoever is connected, and is closed.
    pub fn clear(&self) {
        let room = std::mem::take(&mut *lock(&self.room));
        for guest in room.guests {
            guest.abort();
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.door.abort();
        self.clear();
    }
}

fn lock(room: &Mutex<Room>) -> MutexGuard<'_, Room> {
    room.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: TcpListener, room: Arc<Mutex<Room>>) {
    loop {
        let Ok((stream, from)) = listener.accept().await else {
            // Out of descriptors, or gone again: others may still be served.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        let mut room = lock(&room);
        let shelf = Arc::clone(&room.shelf);
        let mut opening = room.is_open.subscribe();
        let guest = tokio::spawn(async move {
            // The other end goes with the room, and all guests with it.
            let _ = opening.wait_for(|is_open| *is_open).await;
            let _ = stream.set_nodelay(true);
            if let Err(error) = client::serve(stream, &shelf).await
                && error.kind() == io::ErrorKind::InvalidData
            {
                tracing::warn!(%from, %error, "store: shown out");
            }
        });
        room.guests.retain(|guest| !guest.is_finished());
        room.guests.push(guest.abort_handle());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    fn connect(store: &Store) -> TcpStream {
        let mut stream = TcpStream::connect(store.address()).unwrap();
        let greeting = b"\0\xce\xf7\x85\x3c\r\xe1\x10\0\0";
        assert_eq!(ask(&mut stream, greeting, 4), b"\xe1\x10\0\0");
        stream
    }

    fn ask(stream: &mut TcpStream, question: &[u8], length: usize) -> Vec<u8> {
        stream.write_all(question).unwrap();
        let mut answer = vec![0; length];
        stream.read_exact(&mut answer).unwrap();
        answer
    }

    #[test]
    fn clients_share_what_they_set_until_it_is_cleared() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let store = Store::serve("127.0.0.1", 0, runtime.handle()).unwrap();
        store.open();
        let (mut one, mut other) = (connect(&store), connect(&store));
        let wait = b"\x06\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0k";
        one.write_all(wait).unwrap();
        other
            .write_all(b"\x01\x01\0\0\0\0\0\0\0k\x02\0\0\0\0\0\0\0vw")
            .unwrap();
        assert_eq!(ask(&mut one, b"", 1), [0]);
        let get = b"\x03\x01\0\0\0\0\0\0\0k";
        assert_eq!(ask(&mut one, get, 10), b"\x02\0\0\0\0\0\0\0vw");
        assert_eq!(
            ask(
                &mut one,
                b"\x06\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0z\x0c",
                1
            ),
            [1]
        );

        store.clear();
        assert_eq!(one.read(&mut [0; 1]).unwrap_or(0), 0, "it is shown out");
        let mut next = TcpStream::connect(store.address()).unwrap();
        next.write_all(b"\0\xce\xf7\x85\x3c\x07").unwrap();
        next.set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        assert!(next.read(&mut [0; 1]).is_err(), "it waits at the door");
        store.open();
        next.set_read_timeout(None).unwrap();
        assert_eq!(ask(&mut next, b"", 8), [0; 8]);
    }
}
