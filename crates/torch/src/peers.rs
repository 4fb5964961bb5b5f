//! The names of peers that are gone: a failed collective says which ranks closed their connections.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::error::Result;
use crate::sockets::Sockets;
use crate::store::Store;

/// The other ranks of a group and this rank's connections to them.
#[derive(Clone)]
pub(crate) struct Peers {
    sockets: Arc<Sockets>,
    /// Holds the addresses of every rank's ends.
    store: Store,
    /// Global ranks, by index in the group.
    members: Arc<[usize]>,
    /// The rank that serves the store, if no agent does.
    server: Option<usize>,
}

impl Peers {
    /// Publishes this rank's ends of the connections, so that peers can name it.
    pub(crate) fn publish(
        sockets: &Arc<Sockets>,
        store: Store,
        members: &[usize],
        index: usize,
        server: Option<usize>,
    ) -> Result<Peers> {
        let ends: Vec<String> = sockets.local_ends().map(|end| end.to_string()).collect();
        store.set(&index.to_string(), ends.join(" ").as_bytes())?;
        Ok(Peers {
            sockets: Arc::clone(sockets),
            store,
            members: members.into(),
            server,
        })
    }

    /// The ranks that closed their connections before this rank did. A rank that reaches its peers through address
    /// translation cannot be named.
    pub(crate) fn lost(&self) -> Vec<usize> {
        let lost = self.sockets.lost_ends();
        if lost.is_empty() {
            return Vec::new();
        }
        let mut ranks = Vec::new();
        for (index, &rank) in self.members.iter().enumerate() {
            match self.ends_of(index) {
                Ok(ends) if ends.iter().any(|end| lost.contains(end)) => ranks.push(rank),
                Ok(_) => {}
                // The store is gone, and so is the rank that served it.
                Err(_) => return self.server.into_iter().collect(),
            }
        }
        ranks
    }

    fn ends_of(&self, index: usize) -> Result<Vec<SocketAddr>> {
        let key = index.to_string();
        if !self.store.has(&key)? {
            return Ok(Vec::new());
        }
        let ends = self.store.get(&key)?;
        let ends = String::from_utf8_lossy(&ends);
        Ok(ends.split(' ').filter_map(|end| end.parse().ok()).collect())
    }
}
