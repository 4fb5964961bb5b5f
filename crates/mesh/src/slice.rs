//! The slice of a tensor that a rank holds.
//!
//! Axes shard one after the other, the innermost first, and each shards what the previous one left. Chunks need
//! not be even: they have the ceiling size, so later ranks hold less or nothing, as with `torch.chunk`. A flat
//! placement leaves no dimensions, so only flat placements may follow it.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Axis, Dim, Layout, Mesh, MeshError, Packed, Placement};

/// A rectangular region of a tensor.
#[derive(Clone, Debug, Eq, PartialEq, Hash, Serialize, Deserialize)]
pub struct Region {
    /// Offset of the region, per dimension.
    pub offsets: Vec<usize>,
    /// Length of the region, per dimension.
    pub lengths: Vec<usize>,
}

impl Region {
    /// The region that covers the full tensor.
    pub fn full(shape: &[usize]) -> Region {
        Region {
            offsets: vec![0; shape.len()],
            lengths: shape.to_vec(),
        }
    }

    /// Number of elements of the region.
    pub fn num_elements(&self) -> usize {
        self.lengths.iter().product()
    }

    /// The maximal intervals that the region's elements form in the flattened tensor of `shape`, in order.
    pub fn runs(&self, shape: &[usize]) -> impl Iterator<Item = Range<usize>> + use<> {
        // Trailing dimensions that the region covers in full are contiguous in the tensor.
        let dims = (0..shape.len()).rev();
        let first_full = dims
            .take_while(|&dim| self.lengths[dim] == shape[dim])
            .last();
        let inner = first_full.unwrap_or(shape.len()).saturating_sub(1);
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

    /// As [`Self::runs`], but of the elements of the region with these row-major numbers.
    pub fn runs_within(
        &self,
        shape: &[usize],
        elements: Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let mut before = 0;
        self.runs(shape).filter_map(move |run| {
            let first = before;
            before += run.len();
            let (start, end) = (elements.start.max(first), elements.end.min(before));
            (start < end).then(|| run.start + start - first..run.start + end - first)
        })
    }
}

/// The part of a tensor that a rank holds: a region and, under a flat placement, an interval of its elements.
#[derive(Clone, Debug, Eq, PartialEq, Hash, Serialize, Deserialize)]
pub struct Slice {
    /// The region.
    pub region: Region,
    /// The interval of the region's elements in row-major order; absent if the rank holds all of them.
    pub flat: Option<Range<usize>>,
}

impl Slice {
    /// Number of elements of the slice.
    pub fn num_elements(&self) -> usize {
        match &self.flat {
            Some(interval) => interval.len(),
            None => self.region.num_elements(),
        }
    }

    /// Whether the slice has no elements.
    pub fn is_empty(&self) -> bool {
        self.num_elements() == 0
    }
}

/// The interval of chunk `index` of `num_chunks` in `0..length`: of ceiling size, the last ones shorter or empty.
///
/// Zero chunks count as one.
pub fn chunk(length: usize, num_chunks: usize, index: usize) -> Range<usize> {
    let size = length.div_ceil(num_chunks.max(1));
    let start = size.saturating_mul(index).min(length);
    start..start.saturating_add(size).min(length)
}

/// The slice of a tensor of `shape` that `rank` holds under `layout`.
pub fn slice_of(
    shape: &[usize],
    layout: &Layout,
    mesh: &Mesh,
    rank: usize,
) -> Result<Slice, MeshError> {
    check(shape, layout)?;
    let coordinates = mesh.coordinates(rank)?;
    let mut slice = Slice {
        region: Region::full(shape),
        flat: None,
    };
    let mut packed_in = None;
    let (mut num_chunks, mut number) = (1, 0);
    for axis in Axis::ALL_WITH_EXPERT.into_iter().rev() {
        let (size, index) = (mesh.size(axis), coordinates.get(axis));
        match layout.get(axis) {
            Placement::Replicate | Placement::Partial => {}
            Placement::Packed(packed) => {
                packed_in = Some(packed);
                // From the inside out: an index along an outer axis counts all chunks of the inner axes.
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
    if let Some(flat_param) = packed_in {
        let cut = chunk(flat_param.total, num_chunks, number);
        slice.flat = Some(flat_param.intersect(slice.region.num_elements(), cut));
    }
    Ok(slice)
}

impl Packed {
    /// The interval of a tensor's `length` elements that lies in the interval `cut` of the flat parameter.
    pub fn intersect(&self, length: usize, cut: Range<usize>) -> Range<usize> {
        let within = |position: usize| position.saturating_sub(self.start).min(length);
        within(cut.start)..within(cut.end)
    }
}

/// Rejects invalid layouts. It checks every axis, also those of size 1, so that a layout does not become invalid
/// when the mesh grows.
fn check(shape: &[usize], layout: &Layout) -> Result<(), MeshError> {
    shape
        .iter()
        .try_fold(1usize, |product, &length| product.checked_mul(length))
        .ok_or_else(|| MeshError::TooManyElements {
            shape: shape.to_vec(),
        })?;
    let axes = layout.sharded_axes();
    if axes.is_mixed() {
        return Err(MeshError::MixedAxes { axes });
    }
    let mut flat = None;
    let mut packed: Option<Placement> = None;
    for axis in Axis::ALL_WITH_EXPERT.into_iter().rev() {
        let placement = layout.get(axis);
        let mixes = match placement {
            Placement::Packed(_) => flat.is_some() && packed != Some(placement),
            Placement::Flat => packed.is_some(),
            _ => false,
        };
        if mixes {
            return Err(MeshError::MixedFlat { axis });
        }
        match (placement, flat) {
            (Placement::Shard(dim), _) if dim.0 >= shape.len() => {
                return Err(MeshError::DimOutOfRange {
                    axis,
                    dim,
                    shape: shape.to_vec(),
                });
            }
            (Placement::Shard(dim), Some(inner)) => {
                return Err(MeshError::ShardAfterFlat {
                    outer: axis,
                    dim,
                    inner,
                });
            }
            (Placement::Flat, _) => flat = Some(axis),
            (Placement::Packed(_), _) => {
                flat = Some(axis);
                packed = Some(placement);
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
        fn runs_are_the_elements_of_the_region(
            dims in prop::collection::vec((1usize..5, 0usize..5, 0usize..5), 0..4),
            interval in prop::array::uniform2(0usize..130),
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
            prop_assert_eq!(&found, &expected);
            let [start, end] = interval.map(|number| number.min(expected.len()));
            let within = region.runs_within(&shape, start..end.max(start)).flatten();
            prop_assert_eq!(within.collect::<Vec<_>>(), &expected[start..end.max(start)]);
        }
    }

    #[test]
    fn a_shard_of_the_first_dimension_is_one_run() {
        let region = Region {
            offsets: vec![2, 0, 0],
            lengths: vec![3, 4, 5],
        };
        let mut runs = region.runs(&[8, 4, 5]);
        assert_eq!((runs.next(), runs.next()), (Some(40..100), None));
    }

    #[test]
    fn the_innermost_axis_shards_first() {
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
    fn flat_divides_what_the_shard_left() {
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
    fn expert_states_are_sharded_within_each_expert_group() {
        let mesh = Mesh::new(&[(Axis::DpShard, 2), (Axis::Tp, 2)]).unwrap();
        let mesh = mesh.with_ep(2).unwrap();
        let layout = Layout::experts().with(Axis::Efsdp, Placement::Flat);
        let held = (0..4).map(|rank| slice_of(&[4, 3], &layout, &mesh, rank).unwrap());
        let held: Vec<_> = held
            .map(|s| (s.region.offsets[0], s.flat.unwrap()))
            .collect();
        assert_eq!(held, [(0, 0..3), (2, 0..3), (0, 3..6), (2, 3..6)]);
        let mixed = layout.with(Axis::Tp, Placement::Shard(Dim(1)));
        assert!(matches!(
            slice_of(&[4, 3], &mixed, &mesh, 0),
            Err(MeshError::MixedAxes { .. })
        ));
    }

    #[test]
    fn packed_axes_shard_one_flat_parameter_in_rank_order() {
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
    fn packed_and_flat_placements_do_not_mix() {
        let packed = |start| Placement::Packed(Packed { start, total: 9 });
        for (inner, outer) in [
            (packed(0), Placement::Flat),
            (Placement::Flat, packed(0)),
            (packed(0), packed(1)),
        ] {
            let layout = Layout::replicated()
                .with(Axis::Tp, inner)
                .with(Axis::DpShard, outer);
            let rejected = slice_of(&[4], &layout, &mesh(), 0);
            assert_eq!(
                rejected,
                Err(MeshError::MixedFlat {
                    axis: Axis::DpShard
                })
            );
        }
    }

    #[test]
    fn chunks_match_torch_chunk() {
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
    fn scalars_can_be_replicated_or_flat() {
        let flat = Layout::replicated().with(Axis::Tp, Placement::Flat);
        assert_eq!(slice_of(&[], &flat, &mesh(), 0).unwrap().num_elements(), 1);
        assert!(slice_of(&[], &flat, &mesh(), 1).unwrap().is_empty());
    }

    #[test]
    fn invalid_layouts_are_rejected() {
        let sharded = Layout::replicated().with(Axis::Pp, Placement::Shard(Dim(2)));
        assert_eq!(
            slice_of(&[4, 4], &sharded, &mesh(), 0),
            Err(MeshError::DimOutOfRange {
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
            Err(MeshError::ShardAfterFlat {
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
            Err(MeshError::RankOutOfRange {
                rank: 4,
                world_size: 4
            })
        ));
    }
}
