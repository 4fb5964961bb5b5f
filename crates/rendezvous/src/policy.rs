//! The policy of a run: what it executes, its size and its timeouts. All agents of a run must have the same.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Rejection;
use crate::node_info::check_capabilities;

const MAX_NODES: u32 = 16_384;
const MAX_PROGRAM_BYTES: usize = 1024;
const MAX_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 3600);
const MIN_LEASE: Duration = Duration::from_millis(100);

/// What a run executes, how many nodes it needs, how often it may restart, and how long it waits for what.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The command of the workers, for people to read, with a digest; empty if it is not compared. A node with another
    /// one belongs to another job.
    pub program: String,
    /// The minimum number of nodes in a world.
    pub min_nodes: u32,
    /// The maximum number of nodes in a world. Further nodes are on standby.
    pub max_nodes: u32,
    /// How often workers may fail before the run fails. A lost node does not count.
    pub max_restarts: u32,
    /// The capabilities that every node must have.
    pub required_capabilities: BTreeSet<String>,
    /// How long an agent stays a member after its last heartbeat.
    #[serde(with = "millis")]
    pub lease: Duration,
    /// How long more nodes may join the first world, or a running one, once there are at least `min_nodes`.
    #[serde(with = "millis")]
    pub last_call_timeout: Duration,
    /// How long a lost node may rejoin or be replaced before the others go on without it.
    #[serde(with = "millis")]
    pub rejoin_timeout: Duration,
    /// How long a node may take to stop its workers before the others go on without it.
    #[serde(with = "millis")]
    pub stop_timeout: Duration,
    /// How long the run waits for `min_nodes` before it fails.
    #[serde(with = "millis")]
    pub join_timeout: Duration,
}

impl Policy {
    /// A policy with torchrun's default timeouts where torchrun has them, and a lease of 3 s.
    pub fn new(min_nodes: u32, max_nodes: u32) -> Policy {
        Policy {
            program: String::new(),
            min_nodes,
            max_nodes,
            max_restarts: 0,
            required_capabilities: BTreeSet::new(),
            lease: Duration::from_secs(3),
            last_call_timeout: Duration::from_secs(30),
            rejoin_timeout: Duration::from_secs(1),
            stop_timeout: Duration::from_secs(30),
            join_timeout: Duration::from_secs(600),
        }
    }

    /// The same policy for the workers of a command.
    #[must_use]
    pub fn for_command(self, command: &[impl AsRef<OsStr>]) -> Policy {
        const SHOWN: usize = 120;
        let words: Vec<_> = command
            .iter()
            .map(|word| word.as_ref().to_string_lossy())
            .collect();
        let text = words.join(" ");
        let digest = &blake3::hash(text.as_bytes()).to_hex()[..8];
        let shown: String = text.chars().take(SHOWN).collect();
        let more = if shown.len() < text.len() { "..." } else { "" };
        Policy {
            program: format!("{shown}{more} ({digest})"),
            ..self
        }
    }

    /// The interval between heartbeats. Two in a row may be lost.
    pub fn heartbeat(&self) -> Duration {
        self.lease / 3
    }

    /// Rejects a policy that no world could satisfy.
    pub fn check(&self) -> Result<(), Rejection> {
        let (min, max) = (self.min_nodes, self.max_nodes);
        if min < 1 || max < min || max > MAX_NODES {
            return Err(Rejection::malformed(format!(
                "nnodes {min}:{max} is not a valid range: 1 <= MIN <= MAX <= {MAX_NODES}"
            )));
        }
        if self.program.len() > MAX_PROGRAM_BYTES {
            return Err(Rejection::malformed(format!(
                "a program of {} bytes; the maximum is {MAX_PROGRAM_BYTES}",
                self.program.len()
            )));
        }
        if self.lease < MIN_LEASE {
            return Err(Rejection::malformed(format!(
                "a lease of {:?} is too short: the minimum is {MIN_LEASE:?}",
                self.lease
            )));
        }
        let timeouts = [
            self.lease,
            self.last_call_timeout,
            self.rejoin_timeout,
            self.stop_timeout,
            self.join_timeout,
        ];
        if timeouts.iter().any(|&timeout| timeout > MAX_TIMEOUT) {
            return Err(Rejection::malformed(format!(
                "a timeout is too long: the maximum is {MAX_TIMEOUT:?}"
            )));
        }
        check_capabilities(&self.required_capabilities)
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
