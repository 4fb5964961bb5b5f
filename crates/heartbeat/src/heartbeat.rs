//! A rank's heartbeat: the position of its training loop and its pending collectives.
//!
//! A thread of the rank's process writes it several times a second, whatever the loop does. An observer can
//! therefore distinguish a loop that makes no progress (the heartbeat changes, its step does not) from a process
//! that does not run at all (the heartbeat does not change).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use trainyard_trace::{Collective, CollectiveId};

use crate::TrainingMetrics;

/// What a rank's training loop is doing.
#[derive(Copy, Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The rank builds the model or loads a checkpoint; it has not begun a step.
    #[default]
    Starting,
    /// The rank is inside a training step.
    Stepping,
    /// The rank does work of unpredictable length between two steps: it saves or evaluates.
    Between,
    /// The rank takes steps, and does other work between them. Its program does not say which, because its heartbeats
    /// come from outside its training loop.
    Observed,
    /// The loop has finished.
    Ended,
}

/// A collective that a rank has issued and that has not completed.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct PendingCollective {
    /// The collective.
    pub id: CollectiveId,
    /// The global ranks of its group, in group order.
    pub members: Vec<usize>,
    /// When the rank issued it.
    pub since_ns: u64,
    /// Whether the rank is blocked in `wait` for it. If not, the collective overlaps with other work.
    pub is_blocking: bool,
    /// The shapes of its tensors, if the rank records them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shapes: Vec<Vec<u64>>,
}

/// An axis of the mesh of ranks.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct MeshAxis {
    /// The name of the axis.
    pub name: String,
    /// The number of ranks along it.
    pub size: usize,
}

impl PendingCollective {
    /// Describes `pending`, whose group has these members.
    pub fn new(pending: &Collective, members: Vec<usize>) -> PendingCollective {
        PendingCollective {
            id: CollectiveId::of(pending),
            members,
            since_ns: pending.issued_ns,
            is_blocking: pending.waited.is_some(),
            shapes: Vec::new(),
        }
    }
}

/// The latest state of a rank. Times are those of [`Ledger::now_ns`](trainyard_trace::Ledger::now_ns) on the node
/// that wrote it, and can only be compared with each other.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct Heartbeat {
    /// The global rank that wrote it.
    pub rank: usize,
    /// What the training loop is doing.
    pub stage: Stage,
    /// The current step, or the last one.
    pub step: u64,
    /// The last step of the job.
    pub num_steps: u64,
    /// Whether the job asks for a progress bar.
    pub shows_progress: bool,
    /// When the rank entered its current stage and step.
    pub since_ns: u64,
    /// When the rank wrote this heartbeat.
    pub written_ns: u64,
    /// The 99th percentile of step times, once the rank has taken enough steps to estimate it.
    pub p99_step_ns: Option<u64>,
    /// The longest step so far, until there is a 99th percentile.
    pub max_step_ns: Option<u64>,
    /// The fraction of recent step time in which the rank did not wait for other ranks.
    pub busy_fraction: Option<f64>,
    /// The last reported loss.
    pub loss: Option<f64>,
    /// This rank's throughput in tokens per second, if known.
    pub tokens_per_second: Option<f64>,
    /// Peak memory in bytes, if it is measured.
    pub peak_bytes: Option<u64>,
    /// Collectives that have not completed, oldest first.
    pub pending: Vec<PendingCollective>,
    /// The last completed collective of every group.
    pub completed: Vec<CollectiveId>,
    /// The line of the program at which the rank is, if it is known: only when a rank has made no progress for a while.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub position: Option<String>,
    /// The axes of the mesh. The last one changes fastest from rank to rank.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mesh: Vec<MeshAxis>,
    /// What the training loop measures, if it does.
    pub metrics: TrainingMetrics,
}

impl Heartbeat {
    /// The time from `then_ns` until this heartbeat was written.
    pub fn elapsed_since(&self, then_ns: u64) -> Duration {
        Duration::from_nanos(self.written_ns.saturating_sub(then_ns))
    }

    /// The number of steps that the rank has completed; `None` before it has begun one.
    pub fn steps_taken(&self) -> Option<u64> {
        match self.stage {
            Stage::Starting => None,
            Stage::Stepping | Stage::Observed => Some(self.step.saturating_sub(1)),
            Stage::Between | Stage::Ended => Some(self.step),
        }
    }

    /// The step time by which the rank is judged, once it has taken a step.
    pub fn usual_step_ns(&self) -> Option<u64> {
        self.p99_step_ns.or(self.max_step_ns)
    }

    /// Whether the rank is blocked in a collective.
    pub fn is_blocked(&self) -> bool {
        self.pending.iter().any(|pending| pending.is_blocking)
    }

    /// The rank's position as text: its step, and its current or last collective.
    pub fn describe(&self) -> String {
        let step = match self.stage {
            Stage::Starting => "before its first step".to_owned(),
            Stage::Stepping | Stage::Observed => format!("in step {}", self.step),
            Stage::Between => format!("after step {}", self.step),
            Stage::Ended => format!("done after step {}", self.step),
        };
        let blocking = self.pending.iter().find(|pending| pending.is_blocking);
        match (blocking, self.pending.last(), self.completed.last()) {
            (Some(pending), _, _) => format!("{step}, waiting in {}", pending.id),
            (None, Some(pending), _) => format!("{step}, with {} in flight", pending.id),
            (None, None, Some(completed)) => format!("{step}; its last collective was {completed}"),
            (None, None, None) => format!("{step}, before any collective"),
        }
    }
}

#[cfg(test)]
mod tests {
    use trainyard_trace::{CollectiveKind, Purpose};

    use super::*;

    fn id(sequence: u64) -> CollectiveId {
        CollectiveId {
            kind: CollectiveKind::AllReduce,
            purpose: Purpose::Gradient,
            group: "dp_shard".to_owned(),
            sequence,
        }
    }

    #[test]
    fn a_heartbeat_describes_the_position_of_its_rank() {
        let mut heartbeat = Heartbeat::default();
        assert_eq!(
            heartbeat.describe(),
            "before its first step, before any collective"
        );
        (heartbeat.stage, heartbeat.step) = (Stage::Stepping, 12);
        heartbeat.completed.push(id(40));
        assert_eq!(
            heartbeat.describe(),
            "in step 12; its last collective was all_reduce 40 of dp_shard (gradient)"
        );
        heartbeat.pending.push(PendingCollective {
            id: id(41),
            members: vec![0, 1],
            since_ns: 0,
            is_blocking: true,
            shapes: Vec::new(),
        });
        assert_eq!(
            heartbeat.describe(),
            "in step 12, waiting in all_reduce 41 of dp_shard (gradient)"
        );
    }
}
