//! A unit's parameters as one row, cut once.
//!
//! Parameters lie one after the other, flattened. The row is padded at its end, so that every rank
//! holds a chunk of the same length; a parameter may lie in several chunks, and a rank may hold
//! nothing of it.

use std::ops::Range;

use trainyard_mesh::Packed;

/// Where each parameter of a unit lies, and which part of the row each rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    lengths: Vec<usize>,
    starts: Vec<usize>,
    total: usize,
    num_ranks: usize,
}

impl Row {
    /// A row of parameters of these lengths, cut over `num_ranks` ranks.
    pub fn new(lengths: Vec<usize>, num_ranks: usize) -> Row {
        let mut total = 0;
        let starts = lengths.iter().map(|&length| {
            total += length;
            total - length
        });
        let starts = starts.collect();
        Row {
            lengths,
            starts,
            total,
            num_ranks,
        }
    }

    /// Elements of all parameters.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Elements of a rank's chunk, padding included.
    pub fn chunk(&self) -> usize {
        self.total.div_ceil(self.num_ranks)
    }

    /// Elements of the row with its padding.
    pub fn padded(&self) -> usize {
        self.chunk() * self.num_ranks
    }

    /// Where a parameter lies in the row.
    pub fn place(&self, member: usize) -> Range<usize> {
        self.starts[member]..self.starts[member] + self.lengths[member]
    }

    /// The same, as the parameter's layout says it.
    pub fn packed(&self, member: usize) -> Packed {
        Packed {
            start: self.starts[member],
            total: self.total,
        }
    }

    /// Which elements of a parameter `rank` holds, and where they begin in its chunk.
    pub fn held(&self, member: usize, rank: usize) -> (Range<usize>, usize) {
        let chunk = trainyard_mesh::chunk(self.total, self.num_ranks, rank);
        let part = self
            .packed(member)
            .part(self.lengths[member], chunk.clone());
        let at = (self.starts[member] + part.start).saturating_sub(chunk.start);
        // Of what lies in other chunks there is nothing, nowhere in particular.
        let at = if part.is_empty() { 0 } else { at };
        (part, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_put_together_are_the_row(
            lengths in prop::collection::vec(0usize..50, 1..8),
            num_ranks in 1usize..9,
        ) {
            let row = Row::new(lengths.clone(), num_ranks);
            let mut joined = vec![None; row.padded()];
            for rank in 0..num_ranks {
                for member in 0..lengths.len() {
                    let (part, at) = row.held(member, rank);
                    prop_assert!(at + part.len() <= row.chunk());
                    for (offset, element) in part.enumerate() {
                        let slot = &mut joined[rank * row.chunk() + at + offset];
                        prop_assert_eq!(*slot, None);
                        *slot = Some((member, element));
                    }
                }
            }
            let expected = lengths
                .iter()
                .enumerate()
                .flat_map(|(member, &length)| (0..length).map(move |e| Some((member, e))));
            prop_assert!(joined.iter().copied().take(row.total()).eq(expected));
            prop_assert!(joined[row.total()..].iter().all(Option::is_none));
            prop_assert!(row.padded() - row.total() < num_ranks);
        }
    }
}
