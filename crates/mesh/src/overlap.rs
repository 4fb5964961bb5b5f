//! Overlap of two slices of one tensor: all that resharding needs.
//!
//! The elements of a slice are stored in row-major order of its region, or of an interval of it. To get one
//! slice from another, copy the runs of elements that both contain.

use std::ops::Range;

use crate::{Region, Slice};

/// A run of consecutive elements that two slices share.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Overlap {
    /// Offset of the run in the first slice.
    pub from: usize,
    /// Offset of the run in the second slice.
    pub to: usize,
    /// Number of elements.
    pub length: usize,
}

/// The runs that two slices of a tensor of `shape` share, in row-major order.
pub fn overlaps(from: &Slice, to: &Slice, shape: &[usize]) -> Vec<Overlap> {
    if !intersects(&from.region, &to.region) {
        return Vec::new();
    }
    let (mut ours, mut theirs) = (from.runs(shape), to.runs(shape));
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
                // Runs that are adjacent in both slices are merged.
                Some(last)
                    if last.from + last.length == next.from && last.to + last.length == next.to =>
                {
                    last.length += next.length;
                }
                _ => shared.push(next),
            }
        }
        if first.global.end <= second.global.end {
            a = ours.next()
        } else {
            b = theirs.next()
        }
    }
    shared
}

/// Whether two regions have an element in common.
fn intersects(a: &Region, b: &Region) -> bool {
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

/// Consecutive elements of a slice.
struct Run {
    /// Their interval in the flattened tensor.
    global: Range<usize>,
    /// Offset of the first one in the slice.
    local: usize,
}

impl Slice {
    /// The slice that contains the full tensor.
    pub fn full(shape: &[usize]) -> Slice {
        Slice {
            region: Region::full(shape),
            flat: None,
        }
    }

    /// The shape in which the slice is stored: that of its region, or one dimension for a flat interval.
    pub fn shape(&self) -> Vec<usize> {
        match &self.flat {
            Some(interval) => vec![interval.len()],
            None => self.region.lengths.clone(),
        }
    }

    /// The runs of the slice, in storage order.
    fn runs(&self, shape: &[usize]) -> impl Iterator<Item = Run> {
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
            (start < end).then(|| Run {
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

    /// Flat indices of the elements of a slice, in storage order.
    fn elements(slice: &Slice, shape: &[usize]) -> Vec<usize> {
        slice.runs(shape).flat_map(|s| s.global).collect()
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
        /// Whatever mesh saved a tensor, every rank of any other mesh finds each of its elements exactly once.
        #[test]
        fn any_layout_can_be_assembled_from_any_other(
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
            // Of several ranks with the same slice, one saves it.
            let mut known: Vec<Slice> = Vec::new();
            saved.retain(|slice| !known.contains(slice) && { known.push(slice.clone()); true });
            for wanted in slices(&after) {
                let mut filled = vec![None; wanted.num_elements()];
                for source in &saved {
                    let held = elements(source, &shape);
                    for overlap in overlaps(source, &wanted, &shape) {
                        for index in 0..overlap.length {
                            let slot = &mut filled[overlap.to + index];
                            prop_assert!(slot.is_none(), "an element was copied twice");
                            *slot = Some(held[overlap.from + index]);
                        }
                    }
                }
                let expected: Vec<_> = elements(&wanted, &shape).into_iter().map(Some).collect();
                prop_assert_eq!(filled, expected);
            }
        }
    }

    #[test]
    fn full_tensors_overlap_in_one_run() {
        let full = Slice::full(&[3, 4]);
        let all = Overlap {
            from: 0,
            to: 0,
            length: 12,
        };
        assert_eq!(overlaps(&full, &full, &[3, 4]), [all]);
        let scalar = Slice::full(&[]);
        let one = Overlap {
            from: 0,
            to: 0,
            length: 1,
        };
        assert_eq!(overlaps(&scalar, &scalar, &[]), [one]);
    }
}
