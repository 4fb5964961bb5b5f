//! An agent's wish to be part of a run, and whether it can be.

use serde::{Deserialize, Serialize};

use crate::advert::check_name;
use crate::{Advert, Epoch, Policy, Record, Refusal, Report};

/// So that nobody can make epochs or versions run out.
const LAST: u64 = 1 << 48;

/// The newest that an agent knows of, so that even a decider that forgot everything uses nothing twice.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seen {
    /// No epoch up to this one may be used.
    pub epoch: Epoch,
    /// Whoever knows a record of this version believes no older one.
    pub version: u64,
}

impl Seen {
    pub(crate) fn max(self, other: Seen) -> Seen {
        Seen {
            epoch: self.epoch.max(other.epoch),
            version: self.version.max(other.version),
        }
    }
}

/// What an agent joins with.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Join {
    /// The run it wants to be part of.
    pub run: String,
    /// What it asks of its worlds.
    pub policy: Policy,
    /// Who it is.
    pub advert: Advert,
    /// What it knows of earlier worlds.
    pub seen: Seen,
    /// What it last said of its workers; it is said again, in case nobody heard it.
    pub said: Option<(Epoch, Report)>,
}

impl Join {
    /// Whether an agent may be part of the run of this record, as far as that does not depend on the others.
    pub fn check(&self, record: &Record) -> Result<(), Refusal> {
        let Join {
            run,
            policy,
            advert,
            ..
        } = self;
        check_name("run", run)?;
        if *run != record.run {
            return Err(Refusal::OtherRun {
                expected: record.run.clone(),
                given: run.clone(),
            });
        }
        policy.check()?;
        advert.check()?;
        if let Some((_, report)) = &self.said {
            report.check()?;
        }
        let Seen { epoch, version } = self.seen;
        if epoch > Epoch(LAST) || version > LAST {
            let message = format!("{epoch} or version {version} is out of reason");
            return Err(Refusal::malformed(message));
        }
        if let Some(first) = record.policy.as_ref().filter(|first| *first != policy) {
            return Err(Refusal::OtherPolicy {
                node: advert.node.clone(),
                differs: difference(first, policy),
            });
        }
        if let Some(lacking) = policy.requires.difference(&advert.capabilities).next() {
            return Err(Refusal::Lacks {
                node: advert.node.clone(),
                capability: lacking.clone(),
            });
        }
        match advert.node_rank {
            Some(rank) if rank >= policy.max_nodes => Err(Refusal::RankTooHigh {
                rank,
                max_nodes: policy.max_nodes,
            }),
            _ => Ok(()),
        }
    }
}

/// The first difference between two policies, for people.
fn difference(first: &Policy, other: &Policy) -> String {
    if (first.min_nodes, first.max_nodes) != (other.min_nodes, other.max_nodes) {
        return format!(
            "nnodes {}:{}, not {}:{}",
            other.min_nodes, other.max_nodes, first.min_nodes, first.max_nodes
        );
    }
    if first.max_restarts != other.max_restarts {
        return format!(
            "max restarts {}, not {}",
            other.max_restarts, first.max_restarts
        );
    }
    if first.requires != other.requires {
        return "other capabilities are required".into();
    }
    "another wait".into()
}
