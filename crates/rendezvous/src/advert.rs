//! What an agent says of itself when it joins.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Refusal;

/// A name in a run: of the run, of a node, of a capability.
const LONGEST_NAME: usize = 128;
const LONGEST_HOST: usize = 253;
const MOST_CAPABILITIES: usize = 32;
const MOST_WORKERS: u32 = 4096;

/// The number of a world. It only grows, and no two worlds of a run share one; 0 is before the first.
#[derive(
    Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The one after it.
    pub fn next(self) -> Epoch {
        Epoch(self.0.saturating_add(1))
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {}", self.0)
    }
}

/// Where something listens.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Address {
    /// A name or an IP address.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// One agent, as the others need to know it.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Advert {
    /// The node's name; no two nodes of a run share one.
    pub node: String,
    /// Tells an agent from the one before it on the same node: drawn at random when it starts.
    pub instance: u64,
    /// How many workers it will start.
    pub num_workers: u32,
    /// What it has, as words of the user's choice, such as `cuda`.
    pub capabilities: BTreeSet<String>,
    /// The rank it asks for. It gets it if the world is large enough and no survivor has it.
    pub node_rank: Option<u32>,
    /// Where it would listen if the workers' store were on it.
    pub store: Address,
}

impl Advert {
    /// Refuses what nobody should have to handle: names that are no names, and counts out of reason.
    pub fn check(&self) -> Result<(), Refusal> {
        check_name("node", &self.node)?;
        if self.capabilities.len() > MOST_CAPABILITIES {
            return Err(Refusal::malformed(format!(
                "{} capabilities, and {MOST_CAPABILITIES} are the most",
                self.capabilities.len()
            )));
        }
        for capability in &self.capabilities {
            check_name("capability", capability)?;
        }
        if !(1..=MOST_WORKERS).contains(&self.num_workers) {
            return Err(Refusal::malformed(format!(
                "{} workers on one node: 1 to {MOST_WORKERS} are possible",
                self.num_workers
            )));
        }
        if self.store.host.is_empty() || self.store.host.len() > LONGEST_HOST {
            return Err(Refusal::malformed("the store's host is no name".into()));
        }
        Ok(())
    }

    /// Whether this is the same agent, not just another on the same node.
    pub fn is(&self, other: &Advert) -> bool {
        self.instance == other.instance && self.node == other.node
    }
}

/// Names become parts of keys and of lines in logs, so they are plain.
pub fn check_name(what: &str, name: &str) -> Result<(), Refusal> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-:".contains(c);
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(plain) {
        let shown: String = name.chars().take(40).collect();
        return Err(Refusal::malformed(format!(
            "{what} name {shown:?}: 1 to {LONGEST_NAME} of a-z, A-Z, 0-9, `.`, `_`, `-`, `:`"
        )));
    }
    Ok(())
}
