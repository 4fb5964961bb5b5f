//! Which nodes keep replicas of which node's files.

/// The replica servers of a run in the order of nodes, as one node uses them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaPlacement {
    servers: Vec<String>,
    node: usize,
}

/// A list of replica servers is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// An address is not of the form HOST:PORT.
    #[error(
        "`{0}` is not a replica server: write HOST:PORT,HOST:PORT, one per node in the order of nodes"
    )]
    Address(String),
    /// Two nodes cannot share a server.
    #[error("replica server {0} is listed twice: every node needs its own")]
    Duplicate(String),
    /// The list has no server for this node.
    #[error("node {node} has no replica server: the list has {num_servers}, for nodes 0 to {}", num_servers - 1)]
    NoServer {
        /// The rank of this node.
        node: usize,
        /// How many servers the list has.
        num_servers: usize,
    },
}

/// The node that keeps the replicas of `node`: the next one. `None` in a job of one node.
pub fn buddy(node: usize, num_nodes: usize) -> Option<usize> {
    (num_nodes > 1).then(|| (node + 1) % num_nodes)
}

impl ReplicaPlacement {
    /// Parses a comma-separated list of addresses, one per node; `node` is this node's rank.
    pub fn parse(list: &str, node: usize) -> Result<ReplicaPlacement, PlacementError> {
        let mut servers: Vec<String> = Vec::new();
        for server in list.split(',').map(str::trim) {
            let port = server.rsplit_once(':').filter(|(host, _)| !host.is_empty());
            if port
                .and_then(|(_, port)| port.parse::<u16>().ok())
                .is_none()
            {
                return Err(PlacementError::Address(server.to_owned()));
            }
            if servers.iter().any(|other| other == server) {
                return Err(PlacementError::Duplicate(server.to_owned()));
            }
            servers.push(server.to_owned());
        }
        let num_servers = servers.len();
        if node < num_servers {
            Ok(ReplicaPlacement { servers, node })
        } else {
            Err(PlacementError::NoServer { node, num_servers })
        }
    }

    /// Like [`parse`](ReplicaPlacement::parse), for a list that is split already.
    pub fn new(servers: &[String], node: usize) -> Result<ReplicaPlacement, PlacementError> {
        ReplicaPlacement::parse(&servers.join(","), node)
    }

    /// All replica servers, in the order of nodes.
    pub fn servers(&self) -> &[String] {
        &self.servers
    }

    /// The rank of this node.
    pub fn node(&self) -> usize {
        self.node
    }

    /// The replica server of this node.
    pub fn local_server(&self) -> &str {
        &self.servers[self.node]
    }

    /// The nodes to which this node writes its files: itself and its buddy.
    pub(crate) fn targets(&self) -> Vec<usize> {
        let buddy = buddy(self.node, self.servers.len());
        [self.node].into_iter().chain(buddy).collect()
    }

    /// All nodes in the order in which to look for a file: the targets of this node first.
    pub(crate) fn lookup_order(&self) -> Vec<usize> {
        let targets = self.targets();
        let others = (0..self.servers.len()).filter(|node| !targets.contains(node));
        targets.iter().copied().chain(others).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_are_parsed_strictly() {
        let two = ReplicaPlacement::parse("a:1, [::1]:2", 1).unwrap();
        assert_eq!(two.servers(), ["a:1", "[::1]:2"]);
        assert_eq!((two.node(), two.local_server()), (1, "[::1]:2"));
        for bad in ["", "a", "a:", ":1", "a:1,", "a:65536", "a:1,a:1"] {
            assert!(ReplicaPlacement::parse(bad, 0).is_err(), "{bad}");
        }
        assert!(ReplicaPlacement::parse("a:1", 1).is_err());
    }

    proptest! {
        /// Every node has one buddy, and is the buddy of one node.
        #[test]
        fn buddies_form_a_ring(num_nodes in 2usize..200) {
            let mut buddies: Vec<_> = (0..num_nodes).filter_map(|node| buddy(node, num_nodes)).collect();
            prop_assert!(buddies.iter().enumerate().all(|(node, buddy)| node != *buddy));
            buddies.sort_unstable();
            prop_assert_eq!(buddies, (0..num_nodes).collect::<Vec<_>>());
        }

        #[test]
        fn the_lookup_order_has_every_node_once(num_nodes in 1usize..50, node in 0usize..50) {
            let list: Vec<String> = (0..num_nodes).map(|node| format!("h{node}:1")).collect();
            let node = node % num_nodes;
            let placement = ReplicaPlacement::parse(&list.join(","), node).unwrap();
            let mut order = placement.lookup_order();
            prop_assert_eq!(order[0], node);
            order.sort_unstable();
            prop_assert_eq!(order, (0..num_nodes).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_single_node_has_no_buddy() {
        assert_eq!(buddy(0, 1), None);
        let alone = ReplicaPlacement::parse("a:1", 0).unwrap();
        assert_eq!((alone.targets(), alone.lookup_order()), (vec![0], vec![0]));
    }
}
