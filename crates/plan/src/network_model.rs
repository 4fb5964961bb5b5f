//! The time of collectives on nodes connected by a network.
//!
//! The ranks of a group fill nodes as far as they fit. Within a node a ring runs at link bandwidth. Across nodes it
//! runs at the bandwidth of the NICs of its ranks in one node: other groups use the other NICs at the same time.
//! Latency grows with the logarithm of the group size, because communication libraries use trees where latency
//! matters.
use crate::{Cluster, Constants};

/// A process group's size and its placement on nodes.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Group {
    /// Number of ranks.
    pub size: usize,
    /// Number of its ranks in one node.
    pub in_node: usize,
}

impl Group {
    /// A group of `size` ranks with stride `inner`.
    pub fn new(cluster: &Cluster, size: usize, inner: usize) -> Group {
        let in_node = (cluster.gpus_per_node / inner.max(1)).clamp(1, size.max(1));
        Group { size, in_node }
    }

    const fn crosses(&self) -> bool {
        self.in_node < self.size
    }
}

/// Estimates communication times from a cluster's figures and the efficiency constants.
#[derive(Copy, Clone, Debug)]
pub struct NetworkModel<'a> {
    /// The cluster.
    pub cluster: &'a Cluster,
    /// The efficiency of links and NICs.
    pub constants: &'a Constants,
}

impl NetworkModel<'_> {
    fn link(&self) -> f64 {
        self.cluster.accelerator.link.value * self.constants.link
    }

    fn network(&self) -> f64 {
        self.cluster.accelerator.network.value * self.constants.network
    }

    /// Bandwidth of a ring through the group, in bytes per second.
    pub fn ring(&self, group: Group) -> f64 {
        if group.crosses() {
            return self.link().min(self.network() * group.in_node as f64);
        }
        // Without a switch, a small group uses few of the links.
        let accelerator = &self.cluster.accelerator;
        let peers = group.size.saturating_sub(1) as f64;
        let connected = accelerator.link_per_peer.value * self.constants.link * peers;
        self.link().min(connected.max(f64::MIN_POSITIVE))
    }

    /// Seconds of a collective without data.
    pub fn latency(&self, group: Group) -> f64 {
        let doublings = (group.size as f64).log2();
        let inter_node = if group.crosses() {
            self.constants.network_latency
        } else {
            0.0
        };
        self.constants.link_latency * doublings + inter_node
    }

    /// Seconds of an all-gather or reduce-scatter; `bytes` is the size of the full tensor.
    pub fn gather(&self, group: Group, bytes: f64) -> f64 {
        if group.size < 2 || bytes <= 0.0 {
            return 0.0;
        }
        // An all-reduce is a reduce-scatter and an all-gather, so each takes half of its time.
        self.all_reduce(group, bytes) / 2.0
    }

    /// Seconds of an all-reduce of `bytes`.
    pub fn all_reduce(&self, group: Group, bytes: f64) -> f64 {
        if group.size < 2 || bytes <= 0.0 {
            return 0.0;
        }
        let size = group.size as f64;
        self.latency(group) + 2.0 * (size - 1.0) / size * bytes / self.ring(group)
    }

    /// Seconds of an all-to-all in which every rank sends `bytes` in equal chunks.
    pub fn all_to_all(&self, group: Group, bytes: f64) -> f64 {
        if group.size < 2 || bytes <= 0.0 {
            return 0.0;
        }
        let (size, inside) = (group.size as f64, group.in_node as f64);
        let intra_node = bytes * (inside - 1.0) / size / self.link();
        let inter_node = bytes * (size - inside) / size / self.network();
        self.latency(group) + intra_node.max(inter_node)
    }

    /// Seconds of a point-to-point send to the neighboring stage, which all ranks of a node do at the same time. If
    /// `tp` ranks hold the same tensor, each sends its shard and the receivers all-gather.
    pub fn send(&self, crosses: bool, bytes: f64, tp: usize) -> f64 {
        if !crosses {
            let peer = self.cluster.accelerator.link_per_peer.value * self.constants.peer;
            return self.constants.link_latency + bytes / peer;
        }
        let gathered = if tp > 1 { bytes / self.link() } else { 0.0 };
        self.constants.network_latency + bytes / tp as f64 / self.network() + gathered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_share_nics() {
        let cluster: Cluster = "64xH100".parse().unwrap();
        let constants = Constants {
            link: 1.0,
            network: 1.0,
            ..Constants::prior()
        };
        let network = NetworkModel {
            cluster: &cluster,
            constants: &constants,
        };
        let inside = Group::new(&cluster, 8, 1);
        assert_eq!(network.ring(inside), 450e9);
        // All eight NICs of a node serve one ring; with eight rings each has one NIC.
        assert_eq!(network.ring(Group::new(&cluster, 64, 1)), 400e9);
        assert_eq!(network.ring(Group::new(&cluster, 8, 8)), 50e9);
        assert_eq!(network.all_reduce(Group::new(&cluster, 1, 1), 1e9), 0.0);
        let (reduce, gather) = (network.all_reduce(inside, 1e9), network.gather(inside, 1e9));
        assert!((reduce / gather - 2.0).abs() < 0.1);
    }

    #[test]
    fn a_mesh_of_links_is_slow_between_two_peers() {
        let cluster: Cluster = "8xMI300X".parse().unwrap();
        let constants = Constants {
            link: 1.0,
            ..Constants::prior()
        };
        let network = NetworkModel {
            cluster: &cluster,
            constants: &constants,
        };
        assert_eq!(network.ring(Group::new(&cluster, 2, 1)), 64e9);
        assert_eq!(network.ring(Group::new(&cluster, 8, 1)), 448e9);
    }
}
