//! Actions of a pipeline schedule, in PyTorch's notation.

use std::{fmt, str::FromStr};

use crate::ScheduleError;

/// The kind of a computation, as PyTorch's `_ComputationType`.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash, Ord, PartialOrd)]
pub enum ComputeType {
    /// Forward pass of a stage.
    Forward,
    /// Backward pass: gradients of the input and of the weights.
    Backward,
    /// Gradient of the input only, which the previous stage waits for.
    BackwardInput,
    /// Gradients of the weights only, which no other rank waits for.
    BackwardWeight,
}

impl ComputeType {
    /// Whether it produces the gradient of the stage's input, which the previous stage needs.
    pub const fn produces_input_grad(self) -> bool {
        matches!(self, ComputeType::Backward | ComputeType::BackwardInput)
    }

    /// Whether the stage releases the activations of the micro-batch afterwards.
    pub const fn releases_activations(self) -> bool {
        matches!(self, ComputeType::Backward | ComputeType::BackwardWeight)
    }

    const fn letter(self) -> char {
        match self {
            ComputeType::Forward => 'F',
            ComputeType::Backward => 'B',
            ComputeType::BackwardInput => 'I',
            ComputeType::BackwardWeight => 'W',
        }
    }

    const fn from_letter(letter: char) -> Option<ComputeType> {
        match letter {
            'F' => Some(ComputeType::Forward),
            'B' => Some(ComputeType::Backward),
            'I' => Some(ComputeType::BackwardInput),
            'W' => Some(ComputeType::BackwardWeight),
            _ => None,
        }
    }
}

/// A computation on one micro-batch in one stage. Its text form is `2F5`: stage 2, forward, micro-batch 5.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash, Ord, PartialOrd)]
pub struct Task {
    /// Index of the stage in the model.
    pub stage: usize,
    /// The kind of computation.
    pub compute_type: ComputeType,
    /// Index of the micro-batch.
    pub microbatch: usize,
}

impl Task {
    /// A task of the given stage, kind and micro-batch.
    pub const fn new(stage: usize, compute_type: ComputeType, microbatch: usize) -> Task {
        Task {
            stage,
            compute_type,
            microbatch,
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}{}{}",
            self.stage,
            self.compute_type.letter(),
            self.microbatch
        )
    }
}

impl FromStr for Task {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Task, ScheduleError> {
        let parse = || {
            let at = text.find(|c: char| c.is_ascii_uppercase())?;
            let compute_type = ComputeType::from_letter(text[at..].chars().next()?)?;
            let (stage, microbatch) = (text[..at].parse(), text[at + 1..].parse());
            Some(Task::new(stage.ok()?, compute_type, microbatch.ok()?))
        };
        parse().ok_or_else(|| ScheduleError::Parse {
            text: text.to_owned(),
        })
    }
}

/// One step of a rank in a schedule.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub enum Action {
    /// One task.
    Single(Task),
    /// A forward and a backward of different micro-batches that run interleaved, so that the communication of
    /// one overlaps the computation of the other.
    Overlapped(Task, Task),
}

impl Action {
    /// The tasks of the action.
    pub fn tasks(&self) -> impl Iterator<Item = Task> + use<> {
        let (first, second) = match *self {
            Action::Single(task) => (task, None),
            Action::Overlapped(first, second) => (first, Some(second)),
        };
        std::iter::once(first).chain(second)
    }
}

impl From<Task> for Action {
    fn from(task: Task) -> Action {
        Action::Single(task)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Single(task) => task.fmt(f),
            Action::Overlapped(first, second) => write!(f, "({first};{second})OVERLAP_F_B"),
        }
    }
}

impl FromStr for Action {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Action, ScheduleError> {
        let pair = text
            .strip_prefix('(')
            .and_then(|rest| rest.strip_suffix(")OVERLAP_F_B"))
            .and_then(|pair| pair.split_once(';'));
        Ok(match pair {
            Some((first, second)) => Action::Overlapped(first.parse()?, second.parse()?),
            None => Action::Single(text.parse()?),
        })
    }
}
