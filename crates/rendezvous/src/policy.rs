//! What a run asks of its worlds. All agents of a run must ask for the same.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Refusal;
use crate::advert::check_name;

const MOST_NODES: u32 = 16_384;
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);
const SHORTEST_LEASE: Duration = Duration::from_millis(100);

/// What a run asks of its worlds: how many nodes, and how long to wait for what.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// No world is smaller.
    pub min_nodes: u32,
    /// No world is larger; who comes in surplus is parked.
    pub max_nodes: u32,
    /// How often workers may fail before the run does. Lost nodes are not counted.
    pub max_restarts: u32,
    /// What every node must have.
    pub requires: BTreeSet<String>,
    /// How long an agent is believed to be there after it was last heard of.
    #[serde(with = "millis")]
    pub lease: Duration,
    /// How long others may still join when there are enough nodes but not the most.
    #[serde(with = "millis")]
    pub last_call: Duration,
    /// The same after a world was broken: the time in which a lost node may come back or be replaced
    /// before the others go on without it.
    #[serde(with = "millis")]
    pub regather: Duration,
    /// How long a node may take to stop its workers before the others go on without it.
    #[serde(with = "millis")]
    pub stop_within: Duration,
    /// How long to wait for enough nodes before the run is given up.
    #[serde(with = "millis")]
    pub join_timeout: Duration,
}

impl Policy {
    /// Between `min_nodes` and `max_nodes`, with torchrun's times where it has them and a lease of 3 s.
    pub fn new(min_nodes: u32, max_nodes: u32) -> Policy {
        Policy {
            min_nodes,
            max_nodes,
            max_restarts: 0,
            requires: BTreeSet::new(),
            lease: Duration::from_secs(3),
            last_call: Duration::from_secs(30),
            regather: Duration::from_secs(1),
            stop_within: Duration::from_secs(30),
            join_timeout: Duration::from_secs(600),
        }
    }

    /// How often an agent lets itself be heard: two messages may be lost.
    pub fn heartbeat(&self) -> Duration {
        self.lease / 3
    }

    /// Refuses a policy that no world could meet.
    pub fn check(&self) -> Result<(), Refusal> {
        let (min, max) = (self.min_nodes, self.max_nodes);
        if min < 1 || max < min || max > MOST_NODES {
            return Err(Refusal::malformed(format!(
                "nnodes {min}:{max}: 1 <= MIN <= MAX <= {MOST_NODES} is needed"
            )));
        }
        if self.lease < SHORTEST_LEASE {
            return Err(Refusal::malformed(format!(
                "a lease of {:?}: at least {SHORTEST_LEASE:?} is needed",
                self.lease
            )));
        }
        let times = [
            self.lease,
            self.last_call,
            self.regather,
            self.stop_within,
            self.join_timeout,
        ];
        if times.iter().any(|&time| time > LONGEST) {
            return Err(Refusal::malformed(format!(
                "no wait may exceed {LONGEST:?}"
            )));
        }
        if self.requires.len() > 32 {
            return Err(Refusal::malformed(
                "more than 32 capabilities are required".into(),
            ));
        }
        let mut names = self.requires.iter();
        names.try_for_each(|name| check_name("capability", name))
    }
}

mod millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_millis)
    }
}
