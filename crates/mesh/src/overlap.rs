//! What two slices of one tensor have in common: the whole of resharding.
//!
//! A slice's elements lie in some order: its box, row by row, or an interval of that. Whoever holds one
//! slice and wants another copies the stretches both have.

use std::ops::Range;

use crate::{Region, Slice};

/// A stretch of elements that two slices share.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Overlap {
    /// Where it begins among the elements of the first.
    pub from: usize,
    /// Where it begins among the elements of the second.
    pub to: usize,
    /// How many elements.
    pub length: usize,
}

/// The stretches that two slices of a tensor of `shape` share, in the order of its elements.
pub fn overlaps(from: &Slice, to: &Slice, shape: &[usize]) -> Vec<Overlap> {
    if !may_meet(&from.region, &to.region) {
        return Vec::new();
    }
    let (mut ours, mut theirs) = (from.stretches(shape), to.stretches(shape));
    let (mut a, mut b) = (ours.next(), theirs.next());
    let mut shared: Vec<Overlap> = Vec::new();
    while let (Some(first), Some(second)) = (&a, &b) {
        let start = first.global.start.max(second.global.start);
        let end = first.global.end.min(second.global.end);
        if start < end {
            let next = Overlap {
                from: first.local + start - first.global.start,
                to: second.local + start - second.global.start,
                length: end - start,
            };
            match shared.last_mut() {
                // Stretches that go on where the last one ended, on both sides, are one.
                Some(last)
                    if last.from + last.length == next.from && last.to + last.length == next.to =>
                {
                    last.length += next.length;
                }
                _ => shared.push(next),
            }
        }
        match first.global.end <= second.global.end {
            true => a = ours.next(),
            false => b = theirs.next(),
        }
    }
    shared
}

/// Whether two boxes have an element in common.
fn may_meet(a: &Region, b: &Region) -> bool {
    let sides = |region: &Region| -> Vec<Range<usize>> {
        let sides = region.offsets.iter().zip(&region.lengths);
        sides
            .map(|(&start, &length)| start..start + length)
            .collect()
    };
    sides(a)
        .iter()
        .zip(&sides(b))
        .all(|(a, b)| a.start < b.end && b.start < a.end)
}

/// Neighbouring elements of a slice.
struct Stretch {
    /// Where they are in the flattened tensor.
    global: Range<usize>,
    /// Where the first is among the slice's own.
    local: usize,
}

impl Slice {
    /// The whole of a tensor.
    pub fn whole(shape: &[usize]) -> Slice {
        Slice {
            region: Region::whole(shape),
            flat: None,
        }
    }

    /// The shape its elements have by themselves: a box's, or a row.
    pub fn shape(&self) -> Vec<usize> {
        match &self.flat {
            Some(interval) => vec![interval.len()],
            None => self.region.lengths.clone(),
        }
    }

    /// Its elements, in order.
    fn stretches(&self, shape: &[usize]) -> impl Iterator<Item = Stretch> {
        let held = self.flat.clone().unwrap_or(0..self.region.num_elements());
        let mut before = 0;
        let placed = self.region.runs(shape).map(move |run| {
            let within = before..before + run.len();
            before = within.end;
            (run, within)
        });
        placed.filter_map(move |(run, within)| {
            let start = within.start.max(held.start);
            let end = within.end.min(held.end);
            (start < end).then(|| Stretch {
                global: run.start + start - within.start..run.start + end - within.start,
                local: start - held.start,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Axis, Dim, Layout, Mesh, Placement, slice_of};

    /// Numbers of the elements a slice holds, in its own order.
    fn elements(slice: &Slice, shape: &[usize]) -> Vec<usize> {
        slice.stretches(shape).flat_map(|s| s.global).collect()
    }

    fn layouts(num_dims: usize) -> impl Strategy<Value = Layout> {
        let placement = move || {
            prop_oneof![
                Just(Placement::Replicate),
                (0..num_dims).prop_map(|dim| Placement::Shard(Dim(dim))),
            ]
        };
        let flat = prop_oneof![Just(Placement::Replicate), Just(Placement::Flat)];
        (placement(), flat).prop_map(|(tp, shard)| {
            Layout::default()
                .with(Axis::Tp, tp)
                .with(Axis::DpShard, shard)
        })
    }

    fn meshes() -> impl Strategy<Value = Mesh> {
        (1usize..4, 1usize..4)
            .prop_map(|(shard, tp)| Mesh::new(&[(Axis::DpShard, shard), (Axis::Tp, tp)]).unwrap())
    }

    proptest! {
        /// Whatever mesh saved it, every rank of any other mesh finds all it needs, and finds it once.
        #[test]
        fn any_mesh_can_be_put_together_from_any_other(
            (shape, before, after) in prop::collection::vec(1usize..7, 1..4).prop_flat_map(|shape| {
                let dims = shape.len();
                (Just(shape), (meshes(), layouts(dims)), (meshes(), layouts(dims)))
            })
        ) {
            let slices = |(mesh, layout): &(Mesh, Layout)| -> Vec<Slice> {
                let ranks = 0..mesh.world_size();
                ranks.map(|rank| slice_of(&shape, layout, mesh, rank).unwrap()).collect()
            };
            let mut saved = slices(&before);
            // One of those that hold the same has written it.
            let mut known: Vec<Slice> = Vec::new();
            saved.retain(|slice| !known.contains(slice) && { known.push(slice.clone()); true });
            for wanted in slices(&after) {
                let mut filled = vec![None; wanted.num_elements()];
                for piece in &saved {
                    let held = elements(piece, &shape);
                    for overlap in overlaps(piece, &wanted, &shape) {
                        for index in 0..overlap.length {
                            let place = &mut filled[overlap.to + index];
                            prop_assert!(place.is_none(), "twice");
                            *place = Some(held[overlap.from + index]);
                        }
                    }
                }
                let expected: Vec<_> = elements(&wanted, &shape).into_iter().map(Some).collect();
                prop_assert_eq!(filled, expected);
            }
        }
    }

    #[test]
    fn whole_tensors_are_one_stretch() {
        let whole = Slice::whole(&[3, 4]);
        let all = Overlap {
            from: 0,
            to: 0,
            length: 12,
        };
        assert_eq!(overlaps(&whole, &whole, &[3, 4]), [all]);
        let scalar = Slice::whole(&[]);
        let one = Overlap {
            from: 0,
            to: 0,
            length: 1,
        };
        assert_eq!(overlaps(&scalar, &scalar, &[]), [one]);
    }
}
