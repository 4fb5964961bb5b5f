//! The state of a run that survives a crash of the decider, and what it means for each agent.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Address, Epoch, NodeInfo, Policy};

/// The durable state of a run: its current or last world, and its phase. An agent's decision follows from it alone,
/// so nothing else has to be stored.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// The name of the run.
    pub run: String,
    /// Increases with every change, so that an old state is never mistaken for the newest.
    pub version: u64,
    /// The policy of the first agent; `None` before it joins.
    pub policy: Option<Policy>,
    /// The epoch of the newest world.
    pub epoch: Epoch,
    /// The members of that world, by node rank.
    pub world: Vec<NodeInfo>,
    /// The node rank of the member that hosts the workers' TCPStore.
    pub store_host: usize,
    /// How often the workers were restarted after a failure.
    pub restarts: u32,
    /// The phase of the run.
    pub phase: Phase,
}

/// The phase of a run.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Phase {
    /// Nodes join. The last world, if any, was invalidated.
    Joining(Cause),
    /// The world is complete, and its workers run.
    Running,
    /// The run has ended. This phase is final.
    Closed(RunOutcome),
}

/// Why there is no world.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Cause {
    /// The run has just started.
    Start,
    /// A worker failed.
    Failed {
        /// The node of the worker.
        node: String,
        /// The agent's message about the failure.
        message: String,
        /// Whether a restart would not help.
        is_final: bool,
    },
    /// The lease of a node expired, or its agent had to stop its workers.
    Lost {
        /// The node.
        node: String,
    },
    /// A node left.
    Left {
        /// The node.
        node: String,
    },
    /// The world had room for a node on standby.
    ScaleUp,
}

/// How a run ended.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum RunOutcome {
    /// The workers of every node succeeded.
    Succeeded,
    /// Workers failed more often than the policy allows, or in a way that a restart would not cure.
    Failed {
        /// The node of the last failure.
        node: String,
        /// The agent's message about the failure.
        message: String,
        /// How often the workers were restarted before.
        restarts: u32,
    },
    /// Too few nodes joined in time.
    TimedOut {
        /// The number of nodes that had joined.
        have: u32,
        /// The minimum number of nodes.
        need: u32,
    },
}

/// What an agent must do now.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Decision {
    /// Run no workers: stop those of `epoch` if there are any, report [`Stopped`](crate::Report::Stopped) for that
    /// epoch in any case, and wait. No world is formed before every agent has reported.
    Wait {
        /// The epoch of the last world.
        epoch: Epoch,
        /// Why there is no world, for people to read.
        reason: String,
    },
    /// Run workers with these ranks, and no others.
    Run(RankAssignment),
    /// Run no workers: the world is complete without this node, which takes the next rank that becomes free.
    Standby {
        /// The epoch of the running world.
        epoch: Epoch,
    },
    /// Kill the workers of `epoch` at once, and report [`Stopped`](crate::Report::Stopped): the agent cannot reach
    /// the rendezvous, and another node may get its rank as soon as its lease expires. Only the agent itself comes to
    /// this decision; the rendezvous never sends it.
    LeaseExpired {
        /// The epoch of the workers.
        epoch: Epoch,
    },
    /// Stop the workers and exit, because the run has ended.
    Close(RunOutcome),
}

/// The ranks of a node and of its workers in a world.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankAssignment {
    /// The epoch of the world.
    pub epoch: Epoch,
    /// The rank of the node: `GROUP_RANK`.
    pub node_rank: u32,
    /// The number of nodes: `GROUP_WORLD_SIZE`.
    pub num_nodes: u32,
    /// The `RANK` of this node's first worker.
    pub first_rank: u32,
    /// The number of workers on all nodes: `WORLD_SIZE`.
    pub world_size: u32,
    /// How often the workers were restarted after a failure: `TORCHELASTIC_RESTART_COUNT`.
    pub restarts: u32,
    /// The address of the workers' TCPStore in this epoch.
    pub store: Address,
    /// Whether this node hosts the store.
    pub hosts_store: bool,
}

impl RunState {
    /// The state of a run that no agent has joined.
    pub fn new(run: &str) -> RunState {
        RunState {
            run: run.to_owned(),
            version: 0,
            policy: None,
            epoch: Epoch(0),
            world: Vec::new(),
            store_host: 0,
            restarts: 0,
            phase: Phase::Joining(Cause::Start),
        }
    }

    /// The node rank of an agent in the newest world.
    pub fn rank_of(&self, agent: &NodeInfo) -> Option<usize> {
        self.world.iter().position(|member| member.is(agent))
    }

    /// What an agent must do in this state.
    pub fn decision_for(&self, agent: &NodeInfo) -> Decision {
        match (&self.phase, self.rank_of(agent)) {
            (Phase::Closed(outcome), _) => Decision::Close(outcome.clone()),
            (Phase::Joining(cause), _) => Decision::Wait {
                epoch: self.epoch,
                reason: cause.to_string(),
            },
            (Phase::Running, Some(rank)) => Decision::Run(self.assignment(rank)),
            (Phase::Running, None) => Decision::Standby { epoch: self.epoch },
        }
    }

    fn assignment(&self, rank: usize) -> RankAssignment {
        let workers = |members: &[NodeInfo]| members.iter().map(|member| member.num_workers).sum();
        let unknown = Address {
            host: String::new(),
            port: 0,
        };
        RankAssignment {
            epoch: self.epoch,
            node_rank: rank as u32,
            num_nodes: self.world.len() as u32,
            first_rank: workers(&self.world[..rank]),
            world_size: workers(&self.world),
            restarts: self.restarts,
            store: match self.world.get(self.store_host) {
                Some(host) => host.store.clone(),
                None => unknown,
            },
            hosts_store: rank == self.store_host,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Start => write!(f, "waiting for enough nodes"),
            Cause::Failed { node, message, .. } => {
                write!(f, "a worker failed on node `{node}`: {message}")
            }
            Cause::Lost { node } => write!(f, "node `{node}` was lost"),
            Cause::Left { node } => write!(f, "node `{node}` left"),
            Cause::ScaleUp => write!(f, "scaling up: more nodes have joined"),
        }
    }
}

impl fmt::Display for RunOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunOutcome::Succeeded => write!(f, "it succeeded"),
            RunOutcome::Failed {
                node,
                message,
                restarts,
            } => write!(
                f,
                "a worker failed on node `{node}` (restarts used: {restarts}): {message}"
            ),
            RunOutcome::TimedOut { have, need } => {
                write!(f, "only {have} of {need} nodes joined in time")
            }
        }
    }
}
