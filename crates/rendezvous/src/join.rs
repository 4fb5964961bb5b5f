//! What an agent joins a run with, and the checks that it must pass.

use serde::{Deserialize, Serialize};

use crate::node_info::check_name;
use crate::{Epoch, NodeInfo, Policy, Rejection, Report, RunState};

/// The maximum epoch and version in a join, so that no agent can exhaust either.
const MAX_WATERMARK: u64 = 1 << 48;

/// The newest epoch and version that an agent knows, so that even a decider that lost its state reuses neither.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Watermark {
    /// The next epoch must be greater.
    pub epoch: Epoch,
    /// The version of the next run state must be greater, or agents that know this one would ignore it.
    pub version: u64,
}

impl Watermark {
    pub(crate) fn max(self, other: Watermark) -> Watermark {
        Watermark {
            epoch: self.epoch.max(other.epoch),
            version: self.version.max(other.version),
        }
    }
}

/// What an agent joins with.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Join {
    /// The run to join.
    pub run: String,
    /// The agent's policy, which must equal that of the other agents.
    pub policy: Policy,
    /// The agent's node.
    pub node_info: NodeInfo,
    /// What the agent knows of earlier worlds.
    pub watermark: Watermark,
    /// The agent's last report, in case it was lost.
    pub last_report: Option<(Epoch, Report)>,
}

impl Join {
    /// Checks everything that does not depend on the other members of the run.
    pub fn check(&self, run_state: &RunState) -> Result<(), Rejection> {
        self.check_run(run_state)?;
        self.policy.check()?;
        self.node_info.check()?;
        if let Some((_, report)) = &self.last_report {
            report.check()?;
        }
        let Watermark { epoch, version } = self.watermark;
        if epoch > Epoch(MAX_WATERMARK) || version > MAX_WATERMARK {
            let message = format!("{epoch} or version {version} is out of range");
            return Err(Rejection::malformed(message));
        }
        self.check_policy(run_state)
    }

    fn check_run(&self, run_state: &RunState) -> Result<(), Rejection> {
        check_name("run", &self.run)?;
        if self.run == run_state.run {
            return Ok(());
        }
        Err(Rejection::WrongRun {
            expected: run_state.run.clone(),
            given: self.run.clone(),
        })
    }

    fn check_policy(&self, run_state: &RunState) -> Result<(), Rejection> {
        let Join {
            policy, node_info, ..
        } = self;
        let first = run_state.policy.as_ref();
        if let Some(first) = first.filter(|first| first.program != policy.program) {
            return Err(Rejection::OtherProgram {
                node: node_info.node.clone(),
                expected: first.program.clone(),
                given: policy.program.clone(),
            });
        }
        if let Some(first) = first.filter(|first| *first != policy) {
            return Err(Rejection::PolicyMismatch {
                node: node_info.node.clone(),
                difference: difference(first, policy),
            });
        }
        let mut missing = policy
            .required_capabilities
            .difference(&node_info.capabilities);
        if let Some(missing) = missing.next() {
            return Err(Rejection::MissingCapability {
                node: node_info.node.clone(),
                capability: missing.clone(),
            });
        }
        match node_info.node_rank {
            Some(rank) if rank >= policy.max_nodes => Err(Rejection::RankOutOfRange {
                rank,
                max_nodes: policy.max_nodes,
            }),
            _ => Ok(()),
        }
    }
}

/// The first difference between two policies, for people to read.
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
    if first.required_capabilities != other.required_capabilities {
        return "different required capabilities".into();
    }
    "a different timeout".into()
}
