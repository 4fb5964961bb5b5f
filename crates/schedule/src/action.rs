//! What a rank does for one micro-batch in one stage.

use std::{fmt, str::FromStr};

use crate::ScheduleError;

/// The kinds of work.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash, Ord, PartialOrd)]
pub enum Work {
    /// From the input of a stage to its output.
    Forward,
    /// The gradients of input and weights.
    Backward,
    /// The gradient of the input alone, which the stage before waits for.
    BackwardInput,
    /// The gradients of the weights, which nobody waits for.
    BackwardWeight,
}

impl Work {
    /// Whether the stage before gets its gradient from this.
    pub const fn gives_gradient(self) -> bool {
        matches!(self, Work::Backward | Work::BackwardInput)
    }

    /// Whether nothing of the micro-batch is kept in the stage afterwards.
    pub const fn releases(self) -> bool {
        matches!(self, Work::Backward | Work::BackwardWeight)
    }

    const fn letter(self) -> char {
        match self {
            Work::Forward => 'F',
            Work::Backward => 'B',
            Work::BackwardInput => 'I',
            Work::BackwardWeight => 'W',
        }
    }

    const fn of_letter(letter: char) -> Option<Work> {
        match letter {
            'F' => Some(Work::Forward),
            'B' => Some(Work::Backward),
            'I' => Some(Work::BackwardInput),
            'W' => Some(Work::BackwardWeight),
            _ => None,
        }
    }
}

/// Work on one micro-batch in one stage. Written `2F5`: stage 2, forward, micro-batch 5.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash, Ord, PartialOrd)]
pub struct Task {
    /// The stage, counted along the model.
    pub stage: usize,
    /// What is done.
    pub work: Work,
    /// The micro-batch.
    pub microbatch: usize,
}

impl Task {
    /// Some work.
    pub const fn new(stage: usize, work: Work, microbatch: usize) -> Task {
        Task {
            stage,
            work,
            microbatch,
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.work.letter(), self.microbatch)
    }
}

impl FromStr for Task {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Task, ScheduleError> {
        let parts = || {
            let at = text.find(|c: char| c.is_ascii_uppercase())?;
            let work = Work::of_letter(text[at..].chars().next()?)?;
            let (stage, microbatch) = (text[..at].parse(), text[at + 1..].parse());
            Some(Task::new(stage.ok()?, work, microbatch.ok()?))
        };
        parts().ok_or_else(|| ScheduleError::Unreadable {
            text: text.to_owned(),
        })
    }
}

/// One entry of a rank's list.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub enum Action {
    /// One task.
    One(Task),
    /// A forward and a backward of different micro-batches, run beside each other, so that the
    /// communication of one hides behind the computation of the other.
    Both(Task, Task),
}

impl Action {
    /// Its tasks.
    pub fn tasks(&self) -> impl Iterator<Item = Task> + use<> {
        let (first, second) = match *self {
            Action::One(task) => (task, None),
            Action::Both(first, second) => (first, Some(second)),
        };
        std::iter::once(first).chain(second)
    }
}

impl From<Task> for Action {
    fn from(task: Task) -> Action {
        Action::One(task)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::One(task) => task.fmt(f),
            Action::Both(first, second) => write!(f, "({first};{second})OVERLAP_F_B"),
        }
    }
}

impl FromStr for Action {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Action, ScheduleError> {
        let both = text
            .strip_prefix('(')
            .and_then(|rest| rest.strip_suffix(")OVERLAP_F_B"))
            .and_then(|both| both.split_once(';'));
        Ok(match both {
            Some((first, second)) => Action::Both(first.parse()?, second.parse()?),
            None => Action::One(text.parse()?),
        })
    }
}
