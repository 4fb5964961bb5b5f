//! The time of collectives on nodes connected by a network.
//!
//! The ranks of a group fill nodes as far as they fit. Within a node a ring runs at link bandwidth. Across nodes it
//! runs at the bandwidth of the NICs of its ranks in one node: other groups use the other NICs at the same time.
//! Latency grows with the logarithm of the group size, because communication libraries use trees where latency
//! matters. Across sites a ring passes once from each site to the next, and all groups that do so at the same time share
//! the network between the sites.
use crate::{Cluster, Constants};

/// A process group's size and its placement on nodes.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Group {
    /// Number of ranks.
    pub size: usize,
    /// Number of its ranks in one node.
    pub in_node: usize,
    /// Number of its ranks in one site.
    pub in_site: usize,
    /// Number of ranks of one site that belong to different groups like this one, if groups cross sites: their rings share
    /// the network between the sites.
    pub num_sharing: usize,
}

impl Group {
    /// A group of `size` ranks with stride `inner`.
    pub fn new(cluster: &Cluster, size: usize, inner: usize) -> Group {
        let inner = inner.max(1);
        let within = |ranks: usize| (ranks / inner).clamp(1, size.max(1));
        Group {
            size,
            in_node: within(cluster.gpus_per_node),
            in_site: within(cluster.gpus_per_site()),
            num_sharing: inner.min(cluster.gpus_per_site()),
        }
    }

    /// A group of `size` ranks of one site, `in_node` of them in one node.
    pub const fn of_one_site(size: usize, in_node: usize) -> Group {
        Group {
            size,
            in_node,
            in_site: size,
            num_sharing: 1,
        }
    }

    const fn crosses(&self) -> bool {
        self.in_node < self.size
    }

    /// Whether the group has ranks in several sites.
    pub const fn crosses_sites(&self) -> bool {
        self.in_site < self.size
    }

    /// The number of sites with ranks of the group.
    pub const fn num_sites(&self) -> usize {
        self.size.div_ceil(self.in_site)
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

    /// Bandwidth from one site to another, in bytes per second. It is that of the link, without an efficiency: nothing has
    /// been fitted to runs on several sites.
    fn between_sites(&self) -> f64 {
        let sites = self.cluster.sites.as_ref();
        sites.map_or(f64::INFINITY, |sites| sites.bandwidth.value)
    }

    /// Seconds of a round trip between two sites.
    fn round_trip(&self) -> f64 {
        let sites = self.cluster.sites.as_ref();
        sites.map_or(0.0, |sites| sites.round_trip.value)
    }

    /// Bandwidth of a ring through the group, in bytes per second.
    pub fn ring(&self, group: Group) -> f64 {
        if group.crosses() {
            let across = self.link().min(self.network() * group.in_node as f64);
            return if group.crosses_sites() {
                across.min(self.between_sites() / group.num_sharing as f64)
            } else {
                across
            };
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
        // A reduce-scatter and an all-gather each pass half a round trip from every site to the next.
        let hops = (group.num_sites() - 1) as f64 * self.round_trip();
        self.latency(group) + hops + 2.0 * (size - 1.0) / size * bytes / self.ring(group)
    }

    /// Seconds of an all-to-all in which every rank sends `bytes` in equal chunks.
    pub fn all_to_all(&self, group: Group, bytes: f64) -> f64 {
        if group.size < 2 || bytes <= 0.0 {
            return 0.0;
        }
        let (size, inside) = (group.size as f64, group.in_node as f64);
        let intra_node = bytes * (inside - 1.0) / size / self.link();
        let inter_node = bytes * (size - inside) / size / self.network();
        let mut seconds = self.latency(group) + intra_node.max(inter_node);
        if group.crosses_sites() {
            // All ranks of a site send to other sites at the same time.
            let in_site = group.in_site as f64;
            let leaving = bytes * (size - in_site) / size * in_site * group.num_sharing as f64;
            seconds = seconds.max(leaving / self.between_sites()) + self.round_trip() / 2.0;
        }
        seconds
    }

    /// Seconds of a send of `bytes` by every rank to another one of its group.
    pub fn send_across(&self, group: Group, bytes: f64) -> f64 {
        if group.crosses_sites() {
            self.send_to_site(bytes, group.in_site * group.num_sharing)
        } else {
            self.send(group.crosses(), bytes, 1)
        }
    }

    /// Seconds of a send of `bytes` by each of `num_senders` ranks of a site to another site.
    pub fn send_to_site(&self, bytes: f64, num_senders: usize) -> f64 {
        self.round_trip() / 2.0 + bytes * num_senders as f64 / self.between_sites()
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
    fn groups_share_the_network_between_sites() {
        let cluster: Cluster = "2x64xH100@10Gb/s,30ms".parse().unwrap();
        let constants = Constants::prior();
        let network = NetworkModel {
            cluster: &cluster,
            constants: &constants,
        };
        let (all, replicas) = (Group::new(&cluster, 128, 1), Group::new(&cluster, 2, 64));
        assert!(all.crosses_sites() && replicas.crosses_sites());
        assert!(!Group::new(&cluster, 64, 1).crosses_sites());
        assert_eq!(network.ring(all), 1.25e9);
        assert_eq!(network.ring(replicas), 1.25e9 / 64.0);
        // 64 rings of a 64th of the bytes take as long as one ring of two ranks with all.
        let bytes = 32e9;
        let seconds = network.all_reduce(replicas, bytes / 64.0);
        assert!(
            (seconds - (bytes / 1.25e9 + 0.03)).abs() < 1e-2,
            "{seconds}"
        );
        // Half of the bytes of 64 ranks leave a site.
        let seconds = network.all_to_all(all, 1e9);
        assert!(
            (seconds - (32e9 / 1.25e9 + 0.015)).abs() < 1e-2,
            "{seconds}"
        );
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
