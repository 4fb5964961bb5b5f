//! Layout of a flat parameter: the parameters of a unit, concatenated and sharded together.
//!
//! Parameters are flattened and concatenated. The end is padded so that every rank has a chunk of equal length. A
//! parameter may span several chunks, and a rank may hold nothing of it.

use std::ops::Range;

use trainyard_mesh::Packed;

/// The offsets of a unit's parameters in its flat parameter, and the chunk of each rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatParam {
    lengths: Vec<usize>,
    starts: Vec<usize>,
    total: usize,
    num_ranks: usize,
}

impl FlatParam {
    /// A flat parameter of parameters with these lengths, sharded over `num_ranks` ranks.
    pub fn new(lengths: Vec<usize>, num_ranks: usize) -> FlatParam {
        let mut total = 0;
        let starts = lengths.iter().map(|&length| {
            total += length;
            total - length
        });
        let starts = starts.collect();
        FlatParam {
            lengths,
            starts,
            total,
            num_ranks,
        }
    }

    /// Number of elements, without padding.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Number of elements of a rank's chunk, padding included.
    pub fn chunk(&self) -> usize {
        self.total.div_ceil(self.num_ranks)
    }

    /// Number of elements, padding included.
    pub fn padded(&self) -> usize {
        self.chunk() * self.num_ranks
    }

    /// The interval of a parameter in the flat parameter.
    pub fn interval(&self, member: usize) -> Range<usize> {
        self.starts[member]..self.starts[member] + self.lengths[member]
    }

    /// The position of a parameter in the flat parameter, for its layout.
    pub fn packed(&self, member: usize) -> Packed {
        Packed {
            start: self.starts[member],
            total: self.total,
        }
    }

    /// The interval of a parameter's elements that `rank` holds, and its offset in the rank's chunk.
    pub fn shard_of(&self, member: usize, rank: usize) -> (Range<usize>, usize) {
        let chunk = trainyard_mesh::chunk(self.total, self.num_ranks, rank);
        let shard = self
            .packed(member)
            .intersect(self.lengths[member], chunk.clone());
        let offset = (self.starts[member] + shard.start).saturating_sub(chunk.start);
        // The offset of an empty shard could be outside the chunk.
        let offset = if shard.is_empty() { 0 } else { offset };
        (shard, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_concatenate_to_the_flat_parameter(
            lengths in prop::collection::vec(0usize..50, 1..8),
            num_ranks in 1usize..9,
        ) {
            let flat = FlatParam::new(lengths.clone(), num_ranks);
            let mut joined = vec![None; flat.padded()];
            for rank in 0..num_ranks {
                for member in 0..lengths.len() {
                    let (shard, offset) = flat.shard_of(member, rank);
                    prop_assert!(offset + shard.len() <= flat.chunk());
                    for (index, element) in shard.enumerate() {
                        let slot = &mut joined[rank * flat.chunk() + offset + index];
                        prop_assert_eq!(*slot, None);
                        *slot = Some((member, element));
                    }
                }
            }
            let expected = lengths
                .iter()
                .enumerate()
                .flat_map(|(member, &length)| (0..length).map(move |e| Some((member, e))));
            prop_assert!(joined.iter().copied().take(flat.total()).eq(expected));
            prop_assert!(joined[flat.total()..].iter().all(Option::is_none));
            prop_assert!(flat.padded() - flat.total() < num_ranks);
        }
    }
}
