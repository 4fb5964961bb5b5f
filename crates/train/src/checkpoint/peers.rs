//! The in-memory checkpoint store of this job: on replica servers that the launcher names, or that ranks exchange.
//!
//! In an elastic run the nodes are not known in advance. There every rank knows the replica server of its own node,
//! and the ranks exchange the addresses through the store of their world.

use trainyard_peer_checkpoint::{LocalReplicaServer, PeerStore, from_environment};
use trainyard_torch::World;

use crate::error::{Result, TrainError};

/// Opens the store in the memory of peer nodes; `None` if there are no replica servers. All ranks must call it.
pub fn peers(world: &World) -> Result<Option<PeerStore>> {
    let variable = |name: &str| std::env::var(name).ok();
    let failed = |reason: &dyn std::fmt::Display| TrainError::Peers(reason.to_string());
    let local = LocalReplicaServer::from_environment(variable).map_err(|e| failed(&e))?;
    let Some(local) = local else {
        return from_environment(variable).map_err(|e| failed(&e));
    };
    let number = |name: &str| variable(name)?.parse::<usize>().ok();
    let node = number("GROUP_RANK").unwrap_or(0);
    let num_nodes = number("GROUP_WORLD_SIZE").unwrap_or(1);
    let servers = match world.side_store("replica_servers")? {
        Some(store) => {
            if number("LOCAL_RANK").unwrap_or(0) == 0 {
                store.set(&node.to_string(), local.address.as_bytes())?;
            }
            let addresses = (0..num_nodes).map(|node| store.get(&node.to_string()));
            let addresses =
                addresses.map(|bytes| Ok(String::from_utf8_lossy(&bytes?).into_owned()));
            addresses.collect::<Result<Vec<String>>>()?
        }
        None => vec![local.address.clone()],
    };
    let store = local.join_peers(&servers, node).map_err(|e| failed(&e))?;
    Ok(Some(store))
}
