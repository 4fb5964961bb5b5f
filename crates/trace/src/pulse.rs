//! A rank's sign of life: where its loop is and which collectives it stands in, in a small file.
//!
//! A thread of the rank's process writes it several times a second, whatever the loop does, so two things
//! can be told apart from outside: a loop that does not get on (the pulse changes, its step does not), and
//! a process that does not run at all (the pulse does not change).

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Collective, CollectiveKind, Purpose, clock};

/// Names the folder into which ranks write their pulses.
pub const PULSE_FOLDER: &str = "TRAINYARD_PULSE_FOLDER";

/// In that folder, the mark of a launcher that a world is broken.
const OVER: &str = "over";

/// Lets those who write pulses into a folder know that their world is broken: who is told to end has nothing
/// to finish.
pub fn call_over(folder: &Path) -> io::Result<()> {
    fs::write(folder.join(OVER), "")
}

/// Whether the world of those who write pulses into a folder is broken.
pub fn is_over(folder: &Path) -> bool {
    folder.join(OVER).exists()
}

/// What the loop is at.
#[derive(Copy, Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// It builds the model or loads its state; there was no step yet.
    #[default]
    Starting,
    /// It trains.
    Stepping,
    /// It does something between steps that takes as long as it takes: saves or evaluates.
    Between,
    /// It is done.
    Ended,
}

/// Which collective of a group.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Which {
    /// What the group does.
    pub kind: CollectiveKind,
    /// What for.
    pub purpose: Purpose,
    /// The group's name.
    pub group: String,
    /// The how-manieth of its group.
    pub sequence: u64,
}

impl Which {
    /// Of a collective in a ledger.
    pub fn of(collective: &Collective) -> Which {
        Which {
            kind: collective.kind,
            purpose: collective.purpose,
            group: collective.group.clone(),
            sequence: collective.sequence,
        }
    }

    /// Goes on to a later collective of the same group.
    pub(crate) fn advance(&mut self, later: &Collective) {
        self.kind = later.kind;
        self.purpose = later.purpose;
        self.sequence = later.sequence;
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Which {
            kind,
            purpose,
            group,
            sequence,
        } = self;
        write!(f, "{kind} {sequence} of {group} ({purpose})")
    }
}

/// A collective that a rank has begun and not finished.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Entered {
    /// Which.
    pub which: Which,
    /// The ranks of the group, in its order.
    pub members: Vec<usize>,
    /// Since when.
    pub since_ns: u64,
    /// Whether the rank stands in `wait` for it; if not, it does something else meanwhile.
    pub waits: bool,
}

impl Entered {
    /// A pending collective of a group with these members.
    pub fn new(pending: &Collective, members: Vec<usize>) -> Entered {
        Entered {
            which: Which::of(pending),
            members,
            since_ns: pending.issued_ns,
            waits: pending.waited.is_some(),
        }
    }
}

/// A rank's sign of life. Times are those of [`Ledger::now_ns`](crate::Ledger::now_ns) on the machine that
/// wrote it, and mean something only against each other.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct Pulse {
    /// Whose it is.
    pub rank: usize,
    /// What the loop is at.
    pub stage: Stage,
    /// The step it is in, or was in last.
    pub step: u64,
    /// The last step there is to be.
    pub num_steps: u64,
    /// Since when it is at it.
    pub since_ns: u64,
    /// When this was written.
    pub written_ns: u64,
    /// What 99 of a hundred steps stay below, when there were enough to tell.
    pub p99_ns: Option<u64>,
    /// The longest of the steps, as long as there were not enough to tell more.
    pub longest_ns: Option<u64>,
    /// The part of the last steps in which it did not wait for others.
    pub work_share: Option<f64>,
    /// The loss that was reported last.
    pub loss: Option<f64>,
    /// Tokens per second of this rank, where they are known.
    pub tokens_per_second: Option<f64>,
    /// The most bytes held so far, where they are counted.
    pub peak_bytes: Option<u64>,
    /// Collectives begun and not finished, oldest first.
    pub entered: Vec<Entered>,
    /// The last that is finished, of each group.
    pub passed: Vec<Which>,
}

impl Pulse {
    /// Where the pulse of a rank lies.
    pub fn path(folder: &Path, rank: usize) -> PathBuf {
        folder.join(format!("rank_{rank}.json"))
    }

    /// Writes it whole, so that nobody reads half of one.
    pub fn write(&mut self, folder: &Path) -> io::Result<()> {
        self.written_ns = clock::now_ns();
        let text = serde_json::to_vec(self).map_err(io::Error::other)?;
        let next = folder.join(format!(".rank_{}.json", self.rank));
        fs::write(&next, text)?;
        fs::rename(next, Pulse::path(folder, self.rank))
    }

    /// The last one a rank wrote; none if it has not begun to, or wrote something else.
    pub fn read(folder: &Path, rank: usize) -> Option<Pulse> {
        let text = fs::read(Pulse::path(folder, rank)).ok()?;
        let pulse: Pulse = serde_json::from_slice(&text).ok()?;
        // Whose it is, its file says: scripts of others may count their ranks otherwise.
        Some(Pulse { rank, ..pulse })
    }

    /// How long ago something was when this was written.
    pub fn ago(&self, then_ns: u64) -> Duration {
        Duration::from_nanos(self.written_ns.saturating_sub(then_ns))
    }

    /// Whether the loop stands in a collective.
    pub fn waits(&self) -> bool {
        self.entered.iter().any(|entered| entered.waits)
    }

    /// Where it was last: its step, and the collective it was in or had behind it.
    pub fn whereabouts(&self) -> String {
        let place = match self.stage {
            Stage::Starting => "before its first step".to_owned(),
            Stage::Stepping => format!("in step {}", self.step),
            Stage::Between => format!("after step {}", self.step),
            Stage::Ended => format!("done after step {}", self.step),
        };
        let waited = self.entered.iter().find(|entered| entered.waits);
        match (waited, self.entered.last(), self.passed.last()) {
            (Some(entered), _, _) => format!("{place}, waiting in {}", entered.which),
            (None, Some(entered), _) => format!("{place}, with {} under way", entered.which),
            (None, None, Some(passed)) => format!("{place}; its last collective was {passed}"),
            (None, None, None) => format!("{place}, before any collective"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn which(sequence: u64) -> Which {
        Which {
            kind: CollectiveKind::AllReduce,
            purpose: Purpose::Gradient,
            group: "dp_shard".to_owned(),
            sequence,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut pulse = Pulse {
            rank: 3,
            stage: Stage::Stepping,
            step: 12,
            loss: Some(2.5),
            ..Pulse::default()
        };
        assert_eq!(Pulse::read(folder.path(), 3), None);
        pulse.write(folder.path()).unwrap();
        assert_eq!(Pulse::read(folder.path(), 3), Some(pulse));
        fs::write(Pulse::path(folder.path(), 3), "{").unwrap();
        assert_eq!(Pulse::read(folder.path(), 3), None);
    }

    #[test]
    fn whose_a_pulse_is_its_file_says() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(Pulse::path(folder.path(), 9), r#"{"rank": 1, "step": 4}"#).unwrap();
        let pulse = Pulse::read(folder.path(), 9).unwrap();
        assert_eq!((pulse.rank, pulse.step), (9, 4));
    }

    #[test]
    fn a_pulse_says_where_its_rank_was() {
        let mut pulse = Pulse::default();
        assert_eq!(
            pulse.whereabouts(),
            "before its first step, before any collective"
        );
        (pulse.stage, pulse.step) = (Stage::Stepping, 12);
        pulse.passed.push(which(40));
        assert_eq!(
            pulse.whereabouts(),
            "in step 12; its last collective was all_reduce 40 of dp_shard (gradient)"
        );
        pulse.entered.push(Entered {
            which: which(41),
            members: vec![0, 1],
            since_ns: 0,
            waits: true,
        });
        assert_eq!(
            pulse.whereabouts(),
            "in step 12, waiting in all_reduce 41 of dp_shard (gradient)"
        );
    }
}
