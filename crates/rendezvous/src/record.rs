//! What must outlive whoever decides, and what it means for each agent.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Address, Advert, Epoch, Policy};

/// The run so far: which world there is or was, and how the run stands. Every agent can read from it
/// what to do, so nothing else has to be stored or told.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The run.
    pub run: String,
    /// Grows with every change of the record, so that an old one is never taken for the newest.
    pub version: u64,
    /// What the first agent asked for; none before it.
    pub policy: Option<Policy>,
    /// The newest world's number.
    pub epoch: Epoch,
    /// The members of that world, by node rank.
    pub world: Vec<Advert>,
    /// Which of them holds the workers' store.
    pub holder: usize,
    /// How often workers have failed.
    pub restarts: u32,
    /// How the run stands.
    pub phase: Phase,
}

/// How a run stands.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Phase {
    /// No world: the last one, if any, is broken.
    Gathering(Cause),
    /// The world works.
    Running,
    /// The run is over; this does not change any more.
    Closed(Close),
}

/// Why there is no world.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Cause {
    /// There has been none yet.
    Start,
    /// A worker failed.
    Failed {
        /// Where.
        node: String,
        /// What its agent said.
        message: String,
    },
    /// An agent was not heard of in time, or had to stop its workers.
    Lost {
        /// Which.
        node: String,
    },
    /// An agent left.
    Left {
        /// Which.
        node: String,
    },
    /// There is room, and somebody waits.
    Grows,
}

/// How a run ended.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Close {
    /// Every node's workers succeeded.
    Succeeded,
    /// Workers failed more often than allowed.
    Failed {
        /// Where the last time.
        node: String,
        /// What its agent said.
        message: String,
        /// How often before.
        restarts: u32,
    },
    /// There were too few nodes for too long.
    TimedOut {
        /// How many were there.
        have: u32,
        /// How many were needed.
        need: u32,
    },
}

/// What an agent is to do now.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Decision {
    /// Have no workers: stop those of `epoch` if there are any, report [`Stopped`](crate::Report::Stopped) for it
    /// in any case, and wait. No world is formed before.
    Wait {
        /// The last world.
        epoch: Epoch,
        /// Why.
        reason: String,
    },
    /// Run workers at this place, and no others.
    Run(Place),
    /// Have no workers: the world is complete without this node, which takes the next place that
    /// becomes free.
    Park {
        /// The world that runs.
        epoch: Epoch,
    },
    /// Kill the workers of `epoch` at once, and report [`Stopped`](crate::Report::Stopped): whoever decides cannot
    /// be reached, and may give this node's place away as soon as its lease ends. Only an agent itself comes to
    /// this; nobody tells it.
    Lapsed {
        /// The world.
        epoch: Epoch,
    },
    /// Stop, and end.
    Close(Close),
}

/// A node's place in a world.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The world.
    pub epoch: Epoch,
    /// `GROUP_RANK`.
    pub node_rank: u32,
    /// `GROUP_WORLD_SIZE`.
    pub num_nodes: u32,
    /// The `RANK` of this node's first worker.
    pub first_rank: u32,
    /// `WORLD_SIZE`.
    pub world_size: u32,
    /// `TORCHELASTIC_RESTART_COUNT`.
    pub restarts: u32,
    /// Where the workers' store of this epoch is.
    pub store: Address,
    /// Whether this node holds it.
    pub holds_store: bool,
}

impl Record {
    /// A run that nobody has joined.
    pub fn new(run: &str) -> Record {
        Record {
            run: run.to_owned(),
            version: 0,
            policy: None,
            epoch: Epoch(0),
            world: Vec::new(),
            holder: 0,
            restarts: 0,
            phase: Phase::Gathering(Cause::Start),
        }
    }

    /// The node rank of an agent in the newest world.
    pub fn rank_of(&self, agent: &Advert) -> Option<usize> {
        self.world.iter().position(|member| member.is(agent))
    }

    /// What the record means for an agent.
    pub fn decision_for(&self, agent: &Advert) -> Decision {
        match (&self.phase, self.rank_of(agent)) {
            (Phase::Closed(how), _) => Decision::Close(how.clone()),
            (Phase::Gathering(cause), _) => Decision::Wait {
                epoch: self.epoch,
                reason: cause.to_string(),
            },
            (Phase::Running, Some(rank)) => Decision::Run(self.place(rank)),
            (Phase::Running, None) => Decision::Park { epoch: self.epoch },
        }
    }

    fn place(&self, rank: usize) -> Place {
        let workers = |members: &[Advert]| members.iter().map(|member| member.num_workers).sum();
        let nowhere = Address {
            host: String::new(),
            port: 0,
        };
        Place {
            epoch: self.epoch,
            node_rank: rank as u32,
            num_nodes: self.world.len() as u32,
            first_rank: workers(&self.world[..rank]),
            world_size: workers(&self.world),
            restarts: self.restarts,
            store: match self.world.get(self.holder) {
                Some(holder) => holder.store.clone(),
                None => nowhere,
            },
            holds_store: rank == self.holder,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Start => write!(f, "waiting for enough nodes"),
            Cause::Failed { node, message } => {
                write!(f, "a worker failed on node `{node}`: {message}")
            }
            Cause::Lost { node } => write!(f, "node `{node}` was lost"),
            Cause::Left { node } => write!(f, "node `{node}` left"),
            Cause::Grows => write!(f, "more nodes have come"),
        }
    }
}

impl fmt::Display for Close {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Close::Succeeded => write!(f, "it succeeded"),
            Close::Failed {
                node,
                message,
                restarts,
            } => write!(
                f,
                "a worker failed on node `{node}` after {restarts} restarts: {message}"
            ),
            Close::TimedOut { have, need } => {
                write!(f, "{have} nodes came in time, and {need} are needed")
            }
        }
    }
}
