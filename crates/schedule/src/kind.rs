//! The schedules there are, by name.

use std::{fmt, str::FromStr};

use crate::{Schedule, ScheduleError, make};

/// A way of ordering a pipeline's work.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub enum Kind {
    /// All forward, then all backward.
    GPipe,
    /// One forward, one backward: no more micro-batches in flight than there are ranks.
    OneForwardOneBackward,
    /// The same with several stages per rank, for a smaller bubble and more messages.
    Interleaved,
    /// Several stages per rank, all micro-batches through one before the next.
    LoopedBreadthFirst,
    /// One forward, one backward, with the weights' gradients put where ranks would wait.
    ZeroBubbleH1,
    /// Two stages per rank, down and up again: no bubble where forward and both parts of backward
    /// take equally long.
    ZeroBubbleV,
    /// Down and up again, with a forward and a backward beside each other.
    DualPipeV,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 7] = [
        Kind::GPipe,
        Kind::OneForwardOneBackward,
        Kind::Interleaved,
        Kind::LoopedBreadthFirst,
        Kind::ZeroBubbleH1,
        Kind::ZeroBubbleV,
        Kind::DualPipeV,
    ];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::GPipe => "gpipe",
            Kind::OneForwardOneBackward => "1f1b",
            Kind::Interleaved => "interleaved",
            Kind::LoopedBreadthFirst => "looped-bfs",
            Kind::ZeroBubbleH1 => "zb-h1",
            Kind::ZeroBubbleV => "zb-v",
            Kind::DualPipeV => "dualpipe-v",
        }
    }

    /// PyTorch's name in lower case, which configs may use too.
    const fn torchs_name(self) -> &'static str {
        match self {
            Kind::GPipe => "gpipe",
            Kind::OneForwardOneBackward => "1f1b",
            Kind::Interleaved => "interleaved1f1b",
            Kind::LoopedBreadthFirst => "loopedbfs",
            Kind::ZeroBubbleH1 => "zb1p",
            Kind::ZeroBubbleV => "zbvzerobubble",
            Kind::DualPipeV => "dualpipev",
        }
    }

    /// The schedule of `num_ranks` ranks with `num_chunks` stages each.
    pub fn build(
        self,
        num_ranks: usize,
        num_microbatches: usize,
        num_chunks: usize,
    ) -> Result<Schedule, ScheduleError> {
        let refuse = |reason: String| {
            Err(ScheduleError::Shape {
                kind: self.name(),
                reason,
            })
        };
        if num_ranks == 0 || num_microbatches == 0 || num_chunks == 0 {
            return refuse("ranks, micro-batches and stages per rank are at least 1".to_owned());
        }
        let one = num_chunks == 1;
        match self {
            Kind::GPipe if one => Ok(make::gpipe(num_ranks, num_microbatches)),
            Kind::OneForwardOneBackward if one => {
                Ok(make::one_forward_one_backward(num_ranks, num_microbatches))
            }
            Kind::ZeroBubbleH1 if one => Ok(make::zero_bubble_h1(num_ranks, num_microbatches)),
            Kind::Interleaved => Ok(make::interleaved(num_ranks, num_microbatches, num_chunks)),
            Kind::LoopedBreadthFirst => Ok(make::looped(num_ranks, num_microbatches, num_chunks)),
            Kind::ZeroBubbleV if num_chunks == 2 => {
                Ok(make::zero_bubble_v(num_ranks, num_microbatches))
            }
            Kind::DualPipeV if num_chunks == 2 => Ok(make::dualpipe_v(num_ranks, num_microbatches)),
            Kind::ZeroBubbleV | Kind::DualPipeV => {
                refuse(format!("has 2 stages per rank, not {num_chunks}"))
            }
            _ => refuse(format!(
                "has 1 stage per rank, not {num_chunks}: use interleaved or looped-bfs"
            )),
        }
    }

    /// How many stages a rank has, where that is not for the user to say.
    pub const fn num_chunks(self) -> Option<usize> {
        match self {
            Kind::GPipe | Kind::OneForwardOneBackward | Kind::ZeroBubbleH1 => Some(1),
            Kind::ZeroBubbleV | Kind::DualPipeV => Some(2),
            Kind::Interleaved | Kind::LoopedBreadthFirst => None,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kind {
    type Err = ScheduleError;

    fn from_str(name: &str) -> Result<Kind, ScheduleError> {
        let lower = name.to_lowercase();
        let is_named = |kind: &Kind| lower == kind.name() || lower == kind.torchs_name();
        let known = Kind::ALL.into_iter().find(is_named);
        known.ok_or_else(|| ScheduleError::UnknownKind {
            name: name.to_owned(),
            names: Kind::ALL.map(Kind::name).to_vec(),
        })
    }
}
