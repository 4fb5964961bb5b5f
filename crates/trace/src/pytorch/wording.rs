//! The words for ranks, operations and places in the findings of a diagnosis.

use std::{collections::BTreeMap, fmt};

use super::flight_recorder::RecordedCall;

/// `all_reduce 41 of world [1024, 512] float32`.
pub(super) struct Operation<'a>(pub &'a RecordedCall);

impl fmt::Display for Operation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let collective = &self.0.collective;
        let (kind, sequence) = (collective.kind, collective.sequence);
        write!(
            f,
            "{kind} {sequence} of {}{}",
            collective.group,
            Shapes(self.0)
        )
    }
}

/// ` [1024, 512] float32`; nothing for operations without input.
pub(super) struct Shapes<'a>(pub &'a RecordedCall);

/// An all-to-all may have as many inputs as ranks.
const MAX_SHAPES: usize = 4;

impl fmt::Display for Shapes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shapes = &self.0.shapes;
        for shape in shapes.iter().take(MAX_SHAPES) {
            write!(f, " {shape:?}")?;
        }
        if shapes.len() > MAX_SHAPES {
            write!(f, " and {} more", shapes.len() - MAX_SHAPES)?;
        }
        match self.0.collective.dtype.as_str() {
            "" => Ok(()),
            dtype => write!(f, " {dtype}"),
        }
    }
}

/// ` at train.py:41 in step`; nothing if the dump has no stacks.
pub(super) struct Caller<'a>(pub &'a RecordedCall);

impl fmt::Display for Caller<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.caller {
            Some(frame) => write!(f, " at {frame}"),
            None => Ok(()),
        }
    }
}

/// `rank 1` or `ranks 0, 2, 3`.
pub(super) struct Ranks<'a>(pub &'a [usize]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<String> = self.0.iter().map(usize::to_string).collect();
        let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
        write!(f, "{noun} {}", ranks.join(", "))
    }
}

/// `ranks 0, 2 wait at train.py:41 in step, rank 3 waits at eval.py:7 in run`.
pub(super) struct Places<'a> {
    places: BTreeMap<String, Vec<usize>>,
    singular: &'a str,
    plural: &'a str,
}

impl<'a> Places<'a> {
    /// Sorts calls by their place. The verb comes in its singular and its plural.
    pub(super) fn of(
        calls: &[(usize, &RecordedCall)],
        singular: &'a str,
        plural: &'a str,
    ) -> Places<'a> {
        let mut places = BTreeMap::<String, Vec<usize>>::new();
        for (rank, call) in calls {
            places
                .entry(Caller(call).to_string())
                .or_default()
                .push(*rank);
        }
        Places {
            places,
            singular,
            plural,
        }
    }
}

impl fmt::Display for Places<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (place, ranks)) in self.places.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            let verb = if ranks.len() == 1 {
                self.singular
            } else {
                self.plural
            };
            write!(f, "{separator}{} {verb}{place}", Ranks(ranks))?;
        }
        Ok(())
    }
}
