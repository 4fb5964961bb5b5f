//! Which part of a tensor a rank holds.
//!
//! Axes cut one after the other, the innermost first, and each cuts what the one before left.
//! A cut need not be even: chunks are as large as the first must be, so later ranks hold less or
//! nothing, as `torch.chunk` has it. A flat cut leaves no dimensions, so only flat cuts may follow.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Axis, Dim, Layout, Mesh, MeshError, Packed, Placement};

/// A box of a tensor: where it starts and how long it is along each dimension.
#[derive(Clone, Debug, Eq, PartialEq, Hash, Serialize, Deserialize)]
pub struct Region {
    /// Where the box starts, per dimension.
    pub offsets: Vec<usize>,
    /// How long the box is, per dimension.
    pub lengths: Vec<usize>,
}

impl Region {
    /// The whole of a tensor.
    pub fn whole(shape: &[usize]) -> Region {
        Region {
            offsets: vec![0; shape.len()],
            lengths: shape.to_vec(),
        }
    }

    /// How many elements the box holds.
    pub fn num_elements(&self) -> usize {
        self.lengths.iter().product()
    }

    /// Where the box's elements lie in the flattened tensor of `shape`: intervals, in order, as long
    /// as they can be.
    pub fn runs(&self, shape: &[usize]) -> impl Iterator<Item = Range<usize>> + use<> {
        // Dimensions from here on lie next to each other in the box as in the tensor.
        let whole = (0..shape.len()).rev();
        let cut = whole
            .take_while(|&dim| self.lengths[dim] == shape[dim])
            .last();
        let inner = cut.unwrap_or(shape.len()).saturating_sub(1);
        let strides: Vec<usize> = (0..shape.len())
            .map(|dim| shape[dim + 1..].iter().product())
            .collect();
        let run = self.lengths[inner.min(self.lengths.len())..]
            .iter()
            .product::<usize>();
        let outer = self.lengths[..inner.min(self.lengths.len())].to_vec();
        let offsets = self.offsets.clone();
        let num_runs: usize = if run == 0 { 0 } else { outer.iter().product() };
        (0..num_runs).map(move |mut number| {
            let mut start = offsets.get(inner).map_or(0, |at| at * strides[inner]);
            for dim in (0..outer.len()).rev() {
                start += (offsets[dim] + number % outer[dim]) * strides[dim];
                number /= outer[dim];
            }
            start..start + run
        })
    }
}

/// What a rank holds of a tensor: a box and, under a flat placement, an interval of its elements.
#[derive(Clone, Debug, Eq, PartialEq, Hash, Serialize, Deserialize)]
pub struct Slice {
    /// The box.
    pub region: Region,
    /// The interval of the box's elements, flattened in row-major order; absent where it is all.
    pub flat: Option<Range<usize>>,
}

impl Slice {
    /// How many elements the rank holds.
    pub fn num_elements(&self) -> usize {
        match &self.flat {
            Some(interval) => interval.len(),
            None => self.region.num_elements(),
        }
    }

    /// Whether the rank holds nothing.
    pub fn is_empty(&self) -> bool {
        self.num_elements() == 0
    }
}

/// The `index`th of `num_chunks` chunks of `0..length`: ceiling-sized, later ones short or empty.
///
/// No chunks at all are taken as one.
pub fn chunk(length: usize, num_chunks: usize, index: usize) -> Range<usize> {
    let size = length.div_ceil(num_chunks.max(1));
    let start = size.saturating_mul(index).min(length);
    start..start.saturating_add(size).min(length)
}

/// What `rank` holds of a tensor of `shape` under `layout`.
pub fn slice_of(
    shape: &[usize],
    layout: &Layout,
    mesh: &Mesh,
    rank: usize,
) -> Result<Slice, MeshError> {
    check(shape, layout)?;
    let coordinates = mesh.coordinates(rank)?;
    let mut slice = Slice {
        region: Region::whole(shape),
        flat: None,
    };
    let mut row = None;
    let (mut num_chunks, mut number) = (1, 0);
    for axis in Axis::EVERY.into_iter().rev() {
        let (size, index) = (mesh.size(axis), coordinates.get(axis));
        match layout.get(axis) {
            Placement::Replicate | Placement::Partial => {}
            Placement::Packed(packed) => {
                row = Some(packed);
                // From the inside out, so an outer axis counts for all that is within.
                number += index * num_chunks;
                num_chunks *= size;
            }
            Placement::Shard(Dim(dim)) => {
                let cut = chunk(slice.region.lengths[dim], size, index);
                slice.region.offsets[dim] += cut.start;
                slice.region.lengths[dim] = cut.len();
            }
            Placement::Flat => {
                let held = slice.flat.unwrap_or(0..slice.region.num_elements());
                let cut = chunk(held.len(), size, index);
                slice.flat = Some(held.start + cut.start..held.start + cut.end);
            }
        }
    }
    if let Some(row) = row {
        let cut = chunk(row.total, num_chunks, number);
        slice.flat = Some(row.part(slice.region.num_elements(), cut));
    }
    Ok(slice)
}

impl Packed {
    /// Which of a tensor's `length` elements lie in `cut` of the row.
    pub fn part(&self, length: usize, cut: Range<usize>) -> Range<usize> {
        let within = |position: usize| position.saturating_sub(self.start).min(length);
        within(cut.start)..within(cut.end)
    }
}

/// Refuses what no rank could hold. It looks at every axis, also those of size 1, so that a layout
/// does not become wrong when the mesh grows.
fn check(shape: &[usize], layout: &Layout) -> Result<(), MeshError> {
    shape
        .iter()
        .try_fold(1usize, |product, &length| product.checked_mul(length))
        .ok_or_else(|| MeshError::TooManyElements {
            shape: shape.to_vec(),
        })?;
    let axes = layout.cut_axes();
    if axes.is_mixed() {
        return Err(MeshError::CountedTwice { axes });
    }
    let mut flat = None;
    let mut row: Option<Placement> = None;
    for axis in Axis::EVERY.into_iter().rev() {
        let placement = layout.get(axis);
        let mixes = match placement {
            Placement::Packed(_) => flat.is_some() && row != Some(placement),
            Placement::Flat => row.is_some(),
            _ => false,
        };
        if mixes {
            return Err(MeshError::MixedFlat { axis });
        }
        match (placement, flat) {
            (Placement::Shard(dim), _) if dim.0 >= shape.len() => {
                return Err(MeshError::DimOutside {
                    axis,
                    dim,
                    shape: shape.to_vec(),
                });
            }
            (Placement::Shard(dim), Some(inner)) => {
                return Err(MeshError::ShardOutsideFlat {
                    outer: axis,
                    dim,
                    inner,
                });
            }
            (Placement::Flat, _) => flat = Some(axis),
            (Placement::Packed(_), _) => {
                flat = Some(axis);
                row = Some(placement);
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mesh() -> Mesh {
        Mesh::new(&[(Axis::DpShard, 2), (Axis::Tp, 2)]).unwrap()
    }

    proptest! {
        #[test]
        fn runs_are_the_elements_of_the_box(
            dims in prop::collection::vec((1usize..5, 0usize..5, 0usize..5), 0..4),
        ) {
            let shape: Vec<usize> = dims.iter().map(|&(length, _, _)| length).collect();
            let cuts = dims.iter().map(|&(length, a, b)| (a.min(b).min(length), a.max(b).min(length)));
            let (offsets, ends): (Vec<usize>, Vec<usize>) = cuts.unzip();
            let lengths = offsets.iter().zip(&ends).map(|(start, end)| end - start).collect();
            let region = Region { offsets, lengths };
            let total: usize = shape.iter().product();
            let inside = |flat: &usize| {
                let mut rest = *flat;
                (0..shape.len()).rev().all(|dim| {
                    let index = rest % shape[dim];
                    rest /= shape[dim];
                    (region.offsets[dim]..region.offsets[dim] + region.lengths[dim]).contains(&index)
                })
            };
            let expected: Vec<usize> = (0..total).filter(inside).collect();
            let found: Vec<usize> = region.runs(&shape).flatten().collect();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_cut_along_the_first_dimension_is_one_run() {
        let region = Region {
            offsets: vec![2, 0, 0],
            lengths: vec![3, 4, 5],
        };
        let mut runs = region.runs(&[8, 4, 5]);
        assert_eq!((runs.next(), runs.next()), (Some(40..100), None));
    }

    #[test]
    fn the_innermost_axis_cuts_first() {
        let shard = Placement::Shard(Dim(0));
        let layout = Layout::replicated()
            .with(Axis::DpShard, shard)
            .with(Axis::Tp, shard);
        let starts: Vec<usize> = (0..4)
            .map(|rank| {
                slice_of(&[8, 3], &layout, &mesh(), rank)
                    .unwrap()
                    .region
                    .offsets[0]
            })
            .collect();
        assert_eq!(starts, [0, 4, 2, 6]);
    }

    #[test]
    fn flat_cuts_what_the_shard_left() {
        let layout = Layout::replicated()
            .with(Axis::DpShard, Placement::Flat)
            .with(Axis::Tp, Placement::Shard(Dim(1)));
        let slice = slice_of(&[3, 5], &layout, &mesh(), 3).unwrap();
        assert_eq!(
            slice.region,
            Region {
                offsets: vec![0, 3],
                lengths: vec![3, 2]
            }
        );
        assert_eq!(slice.flat, Some(3..6));
    }

    #[test]
    fn shards_of_experts_are_cut_from_each_rank_s_experts() {
        let mesh = Mesh::new(&[(Axis::DpShard, 2), (Axis::Tp, 2)]).unwrap();
        let mesh = mesh.with_ep(2).unwrap();
        let layout = Layout::of_experts().with(Axis::Efsdp, Placement::Flat);
        let held = (0..4).map(|rank| slice_of(&[4, 3], &layout, &mesh, rank).unwrap());
        let held: Vec<_> = held
            .map(|s| (s.region.offsets[0], s.flat.unwrap()))
            .collect();
        assert_eq!(held, [(0, 0..3), (2, 0..3), (0, 3..6), (2, 3..6)]);
        let mixed = layout.with(Axis::Tp, Placement::Shard(Dim(1)));
        assert!(matches!(
            slice_of(&[4, 3], &mixed, &mesh, 0),
            Err(MeshError::CountedTwice { .. })
        ));
    }

    #[test]
    fn packed_axes_cut_one_row_together_in_rank_order() {
        let mesh = Mesh::new(&[(Axis::DpShard, 2), (Axis::Cp, 2)]).unwrap();
        let slices = |start, length| -> Vec<Range<usize>> {
            let packed = Placement::Packed(Packed { start, total: 10 });
            let layout = Layout::replicated()
                .with(Axis::DpShard, packed)
                .with(Axis::Cp, packed);
            (0..4)
                .map(|rank| {
                    slice_of(&[length], &layout, &mesh, rank)
                        .unwrap()
                        .flat
                        .unwrap()
                })
                .collect()
        };
        assert_eq!(slices(0, 4), [0..3, 3..4, 4..4, 4..4]);
        assert_eq!(slices(4, 6), [0..0, 0..2, 2..5, 5..6]);
    }

    #[test]
    fn a_row_and_a_flat_cut_do_not_mix() {
        let packed = |start| Placement::Packed(Packed { start, total: 9 });
        for (inner, outer) in [
            (packed(0), Placement::Flat),
            (Placement::Flat, packed(0)),
            (packed(0), packed(1)),
        ] {
            let layout = Layout::replicated()
                .with(Axis::Tp, inner)
                .with(Axis::DpShard, outer);
            let refused = slice_of(&[4], &layout, &mesh(), 0);
            assert_eq!(
                refused,
                Err(MeshError::MixedFlat {
                    axis: Axis::DpShard
                })
            );
        }
    }

    #[test]
    fn chunks_are_those_of_torch() {
        let lengths = |length, n| {
            (0..n)
                .map(|i| chunk(length, n, i).len())
                .collect::<Vec<_>>()
        };
        assert_eq!(lengths(7, 3), [3, 3, 1]);
        assert_eq!(lengths(5, 4), [2, 2, 1, 0]);
        assert_eq!(lengths(0, 2), [0, 0]);
        assert_eq!(lengths(1, 3), [1, 0, 0]);
    }

    #[test]
    fn scalars_can_be_held_whole_or_flat() {
        let flat = Layout::replicated().with(Axis::Tp, Placement::Flat);
        assert_eq!(slice_of(&[], &flat, &mesh(), 0).unwrap().num_elements(), 1);
        assert!(slice_of(&[], &flat, &mesh(), 1).unwrap().is_empty());
    }

    #[test]
    fn impossible_layouts_are_refused() {
        let sharded = Layout::replicated().with(Axis::Pp, Placement::Shard(Dim(2)));
        assert_eq!(
            slice_of(&[4, 4], &sharded, &mesh(), 0),
            Err(MeshError::DimOutside {
                axis: Axis::Pp,
                dim: Dim(2),
                shape: vec![4, 4]
            })
        );
        let inside_out = Layout::replicated()
            .with(Axis::DpShard, Placement::Shard(Dim(0)))
            .with(Axis::Tp, Placement::Flat);
        assert_eq!(
            slice_of(&[4, 4], &inside_out, &mesh(), 0),
            Err(MeshError::ShardOutsideFlat {
                outer: Axis::DpShard,
                dim: Dim(0),
                inner: Axis::Tp
            })
        );
        assert!(matches!(
            slice_of(&[usize::MAX, 2], &Layout::replicated(), &mesh(), 0),
            Err(MeshError::TooManyElements { .. })
        ));
        assert!(matches!(
            slice_of(&[1], &Layout::replicated(), &mesh(), 4),
            Err(MeshError::RankOutside {
                rank: 4,
                world_size: 4
            })
        ));
    }
}
