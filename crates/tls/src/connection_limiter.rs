//! Limits on the connections of a server with a thread per connection.
//!
//! A client that has not authenticated yet costs a thread and a socket, so only a few such connections are open at a
//! time. When the limit is reached, the limiter closes the one that has been in its handshake longest. A stranger
//! that occupies all of them therefore cannot lock out a client that completes its handshake at once.

use std::collections::{HashMap, VecDeque};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most connections whose handshake is not complete.
const MAX_HANDSHAKING: usize = 32;
/// Most authenticated connections.
const MAX_AUTHENTICATED: usize = 1024;

/// Counts the connections of a server, and closes or rejects those above the limits.
#[derive(Debug, Default)]
pub(crate) struct ConnectionLimiter(Mutex<Connections>);

#[derive(Debug, Default)]
struct Connections {
    /// Oldest first.
    handshaking: VecDeque<(u64, TcpStream)>,
    authenticated: HashMap<u64, TcpStream>,
    /// Includes connections that were closed here but whose threads have not ended yet.
    num_open: usize,
    next_id: u64,
    is_closed: bool,
}

/// The right to hold one connection; dropping it makes room for another.
#[derive(Debug)]
pub(crate) struct ConnectionPermit {
    limiter: Arc<ConnectionLimiter>,
    id: u64,
}

impl ConnectionLimiter {
    /// Admits a connection to the handshake. Returns `None` if the server is full or shutting down.
    pub(crate) fn admit(
        self: &Arc<ConnectionLimiter>,
        stream: &TcpStream,
    ) -> Option<ConnectionPermit> {
        let handle = stream.try_clone().ok()?;
        let mut connections = self.connections();
        if connections.is_closed || connections.num_open >= 2 * MAX_HANDSHAKING + MAX_AUTHENTICATED
        {
            return None;
        }
        if connections.handshaking.len() >= MAX_HANDSHAKING
            && let Some((_, oldest)) = connections.handshaking.pop_front()
        {
            close(&oldest);
        }
        let id = connections.next_id;
        connections.next_id += 1;
        connections.num_open += 1;
        connections.handshaking.push_back((id, handle));
        Some(ConnectionPermit {
            limiter: Arc::clone(self),
            id,
        })
    }

    /// Closes all connections, and admits no others.
    pub(crate) fn close(&self) {
        let mut connections = self.connections();
        connections.is_closed = true;
        connections
            .handshaking
            .iter()
            .for_each(|(_, stream)| close(stream));
        connections.authenticated.values().for_each(close);
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionPermit {
    /// Counts the connection as authenticated. Returns whether there is room for it.
    pub(crate) fn authenticate(&self) -> bool {
        let mut connections = self.limiter.connections();
        let is_own = |(id, _): &(u64, TcpStream)| *id == self.id;
        let Some(index) = connections.handshaking.iter().position(is_own) else {
            return false;
        };
        if connections.authenticated.len() >= MAX_AUTHENTICATED {
            return false;
        }
        if let Some((id, stream)) = connections.handshaking.remove(index) {
            connections.authenticated.insert(id, stream);
        }
        true
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut connections = self.limiter.connections();
        connections.num_open -= 1;
        connections.authenticated.remove(&self.id);
        connections.handshaking.retain(|(id, _)| *id != self.id);
    }
}

/// An error means that the connection is closed already.
fn close(stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_oldest_handshake_is_closed_first_and_authenticated_connections_stay() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let limiter = Arc::new(ConnectionLimiter::default());
        let mut clients = Vec::new();
        let mut permits = Vec::new();
        for index in 0..MAX_HANDSHAKING + 3 {
            clients.push(TcpStream::connect(address).unwrap());
            let permit = limiter.admit(&listener.accept().unwrap().0).unwrap();
            assert!(index > 0 || permit.authenticate());
            permits.push(permit);
        }
        // The first client is authenticated, so the limiter closes the second and the third.
        for closed in &mut clients[1..3] {
            assert_eq!(closed.read(&mut [0]).unwrap(), 0);
        }
        assert!(!permits[1].authenticate());
        assert!(permits[3].authenticate());
        permits.clear();
        assert_eq!(limiter.connections().num_open, 0);
        limiter.close();
        assert!(limiter.admit(&clients[0]).is_none());
    }
}
