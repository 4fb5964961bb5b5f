//! The pipeline schedules by name.

use std::{fmt, str::FromStr};

use crate::{Schedule, ScheduleError, make};

/// A pipeline schedule.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub enum ScheduleKind {
    /// GPipe: all forwards, then all backwards.
    GPipe,
    /// 1F1B: alternates forwards and backwards, with at most as many micro-batches in flight as there are ranks.
    OneForwardOneBackward,
    /// Eager 1F1B: 1F1B with twice the warm-up, which hides the time of sends behind more micro-batches in flight.
    EagerOneForwardOneBackward,
    /// Interleaved 1F1B: several stages per rank, for a smaller bubble and more communication.
    Interleaved,
    /// Looped breadth-first: several stages per rank, all micro-batches through one before the next.
    LoopedBreadthFirst,
    /// ZB-H1: 1F1B with weight gradients deferred into the bubble.
    ZeroBubbleH1,
    /// ZB-V: two stages per rank in V placement. It has no bubble if forward, input gradient and weight
    /// gradient take equally long.
    ZeroBubbleV,
    /// DualPipe-V: two stages per rank in V placement, with overlapped forward and backward.
    DualPipeV,
}

impl ScheduleKind {
    /// All schedules.
    pub const ALL: [ScheduleKind; 8] = [
        ScheduleKind::GPipe,
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::EagerOneForwardOneBackward,
        ScheduleKind::Interleaved,
        ScheduleKind::LoopedBreadthFirst,
        ScheduleKind::ZeroBubbleH1,
        ScheduleKind::ZeroBubbleV,
        ScheduleKind::DualPipeV,
    ];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneForwardOneBackward => "1f1b",
            ScheduleKind::EagerOneForwardOneBackward => "eager-1f1b",
            ScheduleKind::Interleaved => "interleaved",
            ScheduleKind::LoopedBreadthFirst => "looped-bfs",
            ScheduleKind::ZeroBubbleH1 => "zb-h1",
            ScheduleKind::ZeroBubbleV => "zb-v",
            ScheduleKind::DualPipeV => "dualpipe-v",
        }
    }

    /// The name in PyTorch, if it has this schedule; configs may use it as well.
    pub const fn pytorch_name(self) -> Option<&'static str> {
        match self {
            ScheduleKind::GPipe => Some("GPipe"),
            ScheduleKind::OneForwardOneBackward => Some("1F1B"),
            ScheduleKind::Interleaved => Some("Interleaved1F1B"),
            ScheduleKind::LoopedBreadthFirst => Some("LoopedBFS"),
            ScheduleKind::EagerOneForwardOneBackward | ScheduleKind::ZeroBubbleH1 => None,
            ScheduleKind::ZeroBubbleV => Some("ZBVZeroBubble"),
            ScheduleKind::DualPipeV => Some("DualPipeV"),
        }
    }

    /// Builds the schedule of `num_ranks` ranks with `num_chunks` stages each.
    pub fn build(
        self,
        num_ranks: usize,
        num_microbatches: usize,
        num_chunks: usize,
    ) -> Result<Schedule, ScheduleError> {
        let reject = |reason: String| {
            Err(ScheduleError::InvalidShape {
                kind: self.name(),
                reason,
            })
        };
        if num_ranks == 0 || num_microbatches == 0 || num_chunks == 0 {
            return reject("needs at least 1 rank, 1 micro-batch and 1 stage per rank".to_owned());
        }
        let one = num_chunks == 1;
        match self {
            ScheduleKind::GPipe if one => Ok(make::gpipe(num_ranks, num_microbatches)),
            ScheduleKind::OneForwardOneBackward if one => {
                Ok(make::one_forward_one_backward(num_ranks, num_microbatches))
            }
            ScheduleKind::EagerOneForwardOneBackward if one => {
                Ok(make::eager_1f1b(num_ranks, num_microbatches))
            }
            ScheduleKind::ZeroBubbleH1 if one => {
                Ok(make::zero_bubble_h1(num_ranks, num_microbatches))
            }
            ScheduleKind::Interleaved => {
                Ok(make::interleaved(num_ranks, num_microbatches, num_chunks))
            }
            ScheduleKind::LoopedBreadthFirst => {
                Ok(make::looped(num_ranks, num_microbatches, num_chunks))
            }
            ScheduleKind::ZeroBubbleV if num_chunks == 2 => {
                Ok(make::zero_bubble_v(num_ranks, num_microbatches))
            }
            ScheduleKind::DualPipeV if num_chunks == 2 => {
                Ok(make::dualpipe_v(num_ranks, num_microbatches))
            }
            ScheduleKind::ZeroBubbleV | ScheduleKind::DualPipeV => {
                reject(format!("has 2 stages per rank, not {num_chunks}"))
            }
            _ => reject(format!(
                "has 1 stage per rank, not {num_chunks}: use interleaved or looped-bfs"
            )),
        }
    }

    /// The number of stages per rank, if the schedule fixes it.
    pub const fn num_chunks(self) -> Option<usize> {
        match self {
            ScheduleKind::GPipe
            | ScheduleKind::OneForwardOneBackward
            | ScheduleKind::EagerOneForwardOneBackward
            | ScheduleKind::ZeroBubbleH1 => Some(1),
            ScheduleKind::ZeroBubbleV | ScheduleKind::DualPipeV => Some(2),
            ScheduleKind::Interleaved | ScheduleKind::LoopedBreadthFirst => None,
        }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ScheduleKind {
    type Err = ScheduleError;

    fn from_str(name: &str) -> Result<ScheduleKind, ScheduleError> {
        let is_named = |kind: &ScheduleKind| {
            let pytorch_name = kind.pytorch_name();
            name.eq_ignore_ascii_case(kind.name())
                || pytorch_name.is_some_and(|known| name.eq_ignore_ascii_case(known))
        };
        let known = ScheduleKind::ALL.into_iter().find(is_named);
        known.ok_or_else(|| ScheduleError::UnknownKind {
            name: name.to_owned(),
            names: ScheduleKind::ALL.map(ScheduleKind::name).to_vec(),
        })
    }
}
