//! How long collectives take on machines joined by a network.
//!
//! Ranks of a group sit side by side in machines as far as they fit. Inside a machine a ring runs at the
//! links' pace. Between machines it runs at the pace of the network cards of those of its ranks that sit
//! in one machine: the other ranks' groups use the other cards at the same time. Latency grows with the
//! logarithm of the ranks, because libraries take trees where latency counts.

use crate::{Cluster, Constants};

/// A group of ranks as it lies on the machines.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Group {
    /// How many ranks.
    pub size: usize,
    /// How many of them sit in one machine.
    pub in_machine: usize,
}

impl Group {
    /// A group of `size` ranks that lie `inner` apart.
    pub fn new(cluster: &Cluster, size: usize, inner: usize) -> Group {
        let in_machine = (cluster.per_machine / inner.max(1)).clamp(1, size.max(1));
        Group { size, in_machine }
    }

    const fn crosses(&self) -> bool {
        self.in_machine < self.size
    }
}

/// What prices collectives.
#[derive(Copy, Clone, Debug)]
pub struct Wires<'a> {
    /// The machines.
    pub cluster: &'a Cluster,
    /// How far links stay behind their data sheet.
    pub constants: &'a Constants,
}

impl Wires<'_> {
    fn link(&self) -> f64 {
        self.cluster.accelerator.link.value * self.constants.link
    }

    fn network(&self) -> f64 {
        self.cluster.accelerator.network.value * self.constants.network
    }

    /// Bytes per second of a ring through the group.
    pub fn ring(&self, group: Group) -> f64 {
        if group.crosses() {
            return self.link().min(self.network() * group.in_machine as f64);
        }
        // Without a switch, few ranks use few of the links.
        let accelerator = &self.cluster.accelerator;
        let peers = group.size.saturating_sub(1) as f64;
        let wired = accelerator.link_per_peer.value * self.constants.link * peers;
        self.link().min(wired.max(f64::MIN_POSITIVE))
    }

    fn latency(&self, group: Group) -> f64 {
        let doublings = (group.size as f64).log2();
        let beyond = if group.crosses() {
            self.constants.network_latency
        } else {
            0.0
        };
        self.constants.link_latency * doublings + beyond
    }

    /// Gathering or reduce-scattering `bytes`, which is what a rank has afterwards or before.
    pub fn gather(&self, group: Group, bytes: f64) -> f64 {
        if group.size < 2 || bytes <= 0.0 {
            return 0.0;
        }
        // Half of a sum in every respect: a sum is a reduce-scatter and a gather.
        self.all_reduce(group, bytes) / 2.0
    }

    /// Summing `bytes` on every rank.
    pub fn all_reduce(&self, group: Group, bytes: f64) -> f64 {
        if group.size < 2 || bytes <= 0.0 {
            return 0.0;
        }
        let size = group.size as f64;
        self.latency(group) + 2.0 * (size - 1.0) / size * bytes / self.ring(group)
    }

    /// Every rank sends its `bytes` in equal parts to all.
    pub fn all_to_all(&self, group: Group, bytes: f64) -> f64 {
        if group.size < 2 || bytes <= 0.0 {
            return 0.0;
        }
        let (size, inside) = (group.size as f64, group.in_machine as f64);
        let within = bytes * (inside - 1.0) / size / self.link();
        let beyond = bytes * (size - inside) / size / self.network();
        self.latency(group) + within.max(beyond)
    }

    /// One message to the neighbour, which all ranks of a machine send at the same time. Where `tp` ranks
    /// hold the same, each sends its share and the receivers gather.
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
    fn groups_share_cards() {
        let cluster: Cluster = "64xH100".parse().unwrap();
        let constants = Constants {
            link: 1.0,
            network: 1.0,
            ..Constants::likely()
        };
        let wires = Wires {
            cluster: &cluster,
            constants: &constants,
        };
        let inside = Group::new(&cluster, 8, 1);
        assert_eq!(wires.ring(inside), 450e9);
        // All eight cards of a machine serve one ring; with eight rings each has one.
        assert_eq!(wires.ring(Group::new(&cluster, 64, 1)), 400e9);
        assert_eq!(wires.ring(Group::new(&cluster, 8, 8)), 50e9);
        assert_eq!(wires.all_reduce(Group::new(&cluster, 1, 1), 1e9), 0.0);
        let (reduce, gather) = (wires.all_reduce(inside, 1e9), wires.gather(inside, 1e9));
        assert!((reduce / gather - 2.0).abs() < 0.1);
    }

    #[test]
    fn a_mesh_of_links_is_slow_between_two() {
        let cluster: Cluster = "8xMI300X".parse().unwrap();
        let constants = Constants {
            link: 1.0,
            ..Constants::likely()
        };
        let wires = Wires {
            cluster: &cluster,
            constants: &constants,
        };
        assert_eq!(wires.ring(Group::new(&cluster, 2, 1)), 64e9);
        assert_eq!(wires.ring(Group::new(&cluster, 8, 1)), 448e9);
    }
}
