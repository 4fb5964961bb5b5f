//! The ranks of a running job, as its launchers on this node publish them.

use std::ops::Range;

use trainyard_elastic::peer_heartbeats;
use trainyard_heartbeat::{HeartbeatMemory, RankStatus};
use trainyard_launcher::JobInfo;

/// The memory with the heartbeats of a launcher's ranks, and which ranks these are.
pub fn local_heartbeats(info: &JobInfo) -> Option<(HeartbeatMemory, Range<usize>)> {
    let memory = HeartbeatMemory::open(info.heartbeats.as_ref()?, info.first_rank).ok()?;
    Some((memory, info.first_rank..info.first_rank + info.num_ranks))
}

/// The ranks on other nodes with the ranks of their nodes, from the workers' store, if agents serve one.
pub fn remote_ranks(info: &JobInfo) -> Vec<(usize, RankStatus)> {
    let Some((host, port)) = info.store.as_ref().filter(|_| info.num_nodes > 1) else {
        return Vec::new();
    };
    peer_heartbeats(host, *port, info.num_nodes).unwrap_or_default()
}
