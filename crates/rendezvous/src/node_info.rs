//! The description of a node that its agent sends when it joins.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Rejection;

const MAX_NAME_BYTES: usize = 128;
const MAX_HOST_BYTES: usize = 253;
pub(crate) const MAX_CAPABILITIES: usize = 32;
const MAX_WORKERS: u32 = 4096;

/// The number of a world. It only grows, and no two worlds of a run share one. 0 precedes the first world.
#[derive(
    Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The following epoch.
    pub fn next(self) -> Epoch {
        Epoch(self.0.saturating_add(1))
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {}", self.0)
    }
}

/// A network address.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Address {
    /// A host name or an IP address.
    pub host: String,
    /// The TCP port.
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// A node and its agent, as the other nodes need to know them.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeInfo {
    /// The node's name, unique within the run.
    pub node: String,
    /// A random number that distinguishes an agent from earlier agents on the same node.
    pub instance: u64,
    /// The number of workers that the agent will start.
    pub num_workers: u32,
    /// What the node offers, in words of the user's choice, such as `cuda`.
    pub capabilities: BTreeSet<String>,
    /// The requested node rank. The node gets it if the world is large enough and no survivor has it.
    pub node_rank: Option<u32>,
    /// The address at which this node would host the workers' TCPStore.
    pub store: Address,
}

impl NodeInfo {
    /// Rejects invalid names and counts that are out of range.
    pub fn check(&self) -> Result<(), Rejection> {
        check_name("node", &self.node)?;
        check_capabilities(&self.capabilities)?;
        if !(1..=MAX_WORKERS).contains(&self.num_workers) {
            return Err(Rejection::malformed(format!(
                "{} workers on one node; 1 to {MAX_WORKERS} are allowed",
                self.num_workers
            )));
        }
        if self.store.host.is_empty() || self.store.host.len() > MAX_HOST_BYTES {
            return Err(Rejection::malformed(
                "the host of the store is not a valid name".into(),
            ));
        }
        Ok(())
    }

    /// Whether this is the same agent, and not another agent on the same node.
    pub fn is(&self, other: &NodeInfo) -> bool {
        self.instance == other.instance && self.node == other.node
    }
}

/// Rejects more capabilities than any node needs, and invalid names among them.
pub(crate) fn check_capabilities(capabilities: &BTreeSet<String>) -> Result<(), Rejection> {
    if capabilities.len() > MAX_CAPABILITIES {
        return Err(Rejection::malformed(format!(
            "{} capabilities; the maximum is {MAX_CAPABILITIES}",
            capabilities.len()
        )));
    }
    let mut names = capabilities.iter();
    names.try_for_each(|name| check_name("capability", name))
}

/// Rejects names that could not be part of a key or of a log line.
pub fn check_name(what: &str, name: &str) -> Result<(), Rejection> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-:".contains(c);
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.chars().all(is_plain) {
        let shown: String = name.chars().take(40).collect();
        return Err(Rejection::malformed(format!(
            "{shown:?} is not a valid {what} name: use 1 to {MAX_NAME_BYTES} of a-z, A-Z, 0-9, `.`, `_`, `-`, `:`"
        )));
    }
    Ok(())
}
