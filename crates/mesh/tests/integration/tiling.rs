//! The slices of all ranks tile a tensor: every element is held exactly once per replica.

use std::collections::HashMap;

use proptest::prelude::*;
use trainyard_mesh::{Axis, AxisSet, Dim, Layout, Mesh, Placement, Slice, slice_of};

fn any_mesh() -> impl Strategy<Value = Mesh> {
    prop::array::uniform5(1usize..=4).prop_map(|sizes| {
        let sizes: Vec<(Axis, usize)> = Axis::ALL.into_iter().zip(sizes).collect();
        Mesh::new(&sizes).unwrap()
    })
}

/// Shards on the inner axes, flat placements from some axis outwards (or never), replicas anywhere.
fn any_layout(num_dims: usize) -> impl Strategy<Value = Layout> {
    let choices = prop::array::uniform5((0u8..4, 0..num_dims));
    (choices, 0..=Axis::COUNT).prop_map(|(choices, first_flat)| {
        Axis::ALL.into_iter().rev().zip(choices).enumerate().fold(
            Layout::replicated(),
            |layout, (depth, (axis, (choice, dim)))| {
                let placement = match choice {
                    0 => Placement::Replicate,
                    1 => Placement::Partial,
                    _ if depth >= first_flat => Placement::Flat,
                    _ => Placement::Shard(Dim(dim)),
                };
                layout.with(axis, placement)
            },
        )
    })
}

fn any_case() -> impl Strategy<Value = (Mesh, Vec<usize>, Layout)> {
    prop::collection::vec(0usize..=7, 1..=3).prop_flat_map(|shape| {
        let num_dims = shape.len();
        (any_mesh(), Just(shape), any_layout(num_dims))
    })
}

/// The row-major indices in the full tensor of the elements of `slice`.
fn elements(shape: &[usize], slice: &Slice) -> Vec<usize> {
    let lengths = &slice.region.lengths;
    let interval = slice.flat.clone().unwrap_or(0..slice.region.num_elements());
    interval
        .map(|mut local| {
            let mut index = vec![0; shape.len()];
            for dim in (0..shape.len()).rev() {
                index[dim] = slice.region.offsets[dim] + local % lengths[dim];
                local /= lengths[dim];
            }
            index
                .iter()
                .zip(shape)
                .fold(0, |index, (at, length)| index * length + at)
        })
        .collect()
}

proptest! {
    #[test]
    fn every_element_is_held_once_per_replica((mesh, shape, layout) in any_case()) {
        let mut held = vec![0usize; shape.iter().product()];
        for rank in 0..mesh.world_size() {
            let slice = slice_of(&shape, &layout, &mesh, rank).unwrap();
            let elements = elements(&shape, &slice);
            prop_assert_eq!(elements.len(), slice.num_elements());
            for element in elements {
                held[element] += 1;
            }
        }
        let num_replicas = mesh.size_of(layout.sharded_axes().complement());
        prop_assert!(held.iter().all(|&count| count == num_replicas));
    }

    #[test]
    fn ranks_along_sharded_axes_tile_exactly_once(
        (mesh, shape, layout) in any_case(),
        choice in any::<prop::sample::Index>(),
    ) {
        let rank = choice.index(mesh.world_size());
        let mut held: Vec<usize> = mesh
            .group(rank, layout.sharded_axes())
            .unwrap()
            .into_iter()
            .flat_map(|member| {
                elements(&shape, &slice_of(&shape, &layout, &mesh, member).unwrap())
            })
            .collect();
        held.sort_unstable();
        prop_assert!(held.into_iter().eq(0..shape.iter().product::<usize>()));
    }

    #[test]
    fn ranks_along_other_axes_hold_the_same((mesh, shape, layout) in any_case()) {
        let mut by_index = HashMap::new();
        for rank in 0..mesh.world_size() {
            let index = mesh.index_in_group(rank, layout.sharded_axes()).unwrap();
            let slice = slice_of(&shape, &layout, &mesh, rank).unwrap();
            prop_assert_eq!(by_index.entry(index).or_insert_with(|| slice.clone()), &slice);
        }
    }

    #[test]
    fn slices_round_trip_through_json((mesh, shape, layout) in any_case()) {
        let slice = slice_of(&shape, &layout, &mesh, mesh.world_size() - 1).unwrap();
        let json = serde_json::to_string(&slice).unwrap();
        prop_assert_eq!(serde_json::from_str::<Slice>(&json).unwrap(), slice);
        let json = serde_json::to_string(&layout).unwrap();
        prop_assert_eq!(serde_json::from_str::<Layout>(&json).unwrap(), layout);
    }
}

#[test]
fn sixteen_thousand_ranks_tile_a_large_weight() {
    let mesh = Mesh::new(&[
        (Axis::Pp, 16),
        (Axis::DpReplicate, 4),
        (Axis::DpShard, 8),
        (Axis::Cp, 4),
        (Axis::Tp, 8),
    ])
    .unwrap();
    let layout = Layout::replicated()
        .with(Axis::DpShard, Placement::Flat)
        .with(Axis::Cp, Placement::Flat)
        .with(Axis::Tp, Placement::Shard(Dim(0)));
    let shape = [53_249, 16_384];
    let held: usize = mesh
        .group(9_999, AxisSet::of([Axis::DpShard, Axis::Cp, Axis::Tp]))
        .unwrap()
        .into_iter()
        .map(|rank| {
            slice_of(&shape, &layout, &mesh, rank)
                .unwrap()
                .num_elements()
        })
        .sum();
    assert_eq!(held, shape.iter().product::<usize>());
}
