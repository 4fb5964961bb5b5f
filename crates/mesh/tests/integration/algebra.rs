//! Properties of ranks, coordinates and groups, on meshes of up to 16,384 ranks.

use proptest::prelude::*;
use trainyard_mesh::{Axis, AxisSet, Coordinates, Mesh, MeshError};

const MAX_RANKS: usize = 16_384;

/// Sizes whose product is at most `MAX_RANKS`; a random axis gets its size first.
fn any_mesh() -> impl Strategy<Value = Mesh> {
    (prop::array::uniform6(1usize..=32), 0usize..Axis::COUNT).prop_map(|(wanted, first)| {
        let mut budget = MAX_RANKS;
        let sizes: Vec<(Axis, usize)> = (0..Axis::COUNT)
            .map(|turn| {
                let axis = Axis::ALL[(first + turn) % Axis::COUNT];
                let size = wanted[turn].min(budget);
                budget /= size;
                (axis, size)
            })
            .collect();
        Mesh::new(&sizes).unwrap()
    })
}

fn largest_mesh() -> Mesh {
    Mesh::new(&[
        (Axis::Pp, 16),
        (Axis::DpReplicate, 4),
        (Axis::DpShard, 8),
        (Axis::Cp, 4),
        (Axis::Tp, 8),
    ])
    .unwrap()
}

fn any_axes() -> impl Strategy<Value = AxisSet> {
    prop::sample::subsequence(Axis::ALL.to_vec(), 0..=Axis::COUNT).prop_map(AxisSet::of)
}

fn mesh_and_rank() -> impl Strategy<Value = (Mesh, usize)> {
    prop_oneof![9 => any_mesh().boxed(), 1 => Just(largest_mesh()).boxed()].prop_flat_map(|mesh| {
        let ranks = 0..mesh.world_size();
        (Just(mesh), ranks)
    })
}

/// Whether every rank is in exactly one of `groups`.
fn partitions(groups: impl Iterator<Item = Vec<usize>>, world_size: usize) -> bool {
    let mut seen = vec![false; world_size];
    for rank in groups.flatten() {
        if std::mem::replace(&mut seen[rank], true) {
            return false;
        }
    }
    seen.into_iter().all(|seen| seen)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn coordinates_and_ranks_are_a_bijection((mesh, _) in mesh_and_rank()) {
        let mut previous: Option<[usize; Axis::COUNT]> = None;
        for rank in 0..mesh.world_size() {
            let at = mesh.coordinates(rank).unwrap();
            prop_assert_eq!(mesh.rank_at(&at).unwrap(), rank);
            // Ascending ranks have lexicographically ascending coordinates, so no two are equal.
            let digits = Axis::ALL.map(|axis| at.get(axis));
            prop_assert!(previous.is_none_or(|previous| previous < digits));
            previous = Some(digits);
        }
    }

    #[test]
    fn groups_partition_the_world((mesh, _) in mesh_and_rank(), axes in any_axes()) {
        prop_assert!(partitions(mesh.groups(axes), mesh.world_size()));
        prop_assert!(mesh.groups(axes).all(|group| group.len() == mesh.size_of(axes)));
    }

    #[test]
    fn members_of_a_group_agree_on_it((mesh, rank) in mesh_and_rank(), axes in any_axes()) {
        let group = mesh.group(rank, axes).unwrap();
        prop_assert!(group.is_sorted());
        prop_assert!(mesh.groups(axes).any(|listed| listed == group));
        for (index, &member) in group.iter().enumerate().take(64) {
            prop_assert_eq!(mesh.index_in_group(member, axes).unwrap(), index);
            prop_assert_eq!(&mesh.group(member, axes).unwrap(), &group);
        }
        prop_assert_eq!(group[mesh.index_in_group(rank, axes).unwrap()], rank);
    }

    #[test]
    fn members_differ_only_along_the_axes((mesh, rank) in mesh_and_rank(), axes in any_axes()) {
        let here = mesh.coordinates(rank).unwrap();
        for member in mesh.group(rank, axes).unwrap() {
            let there = mesh.coordinates(member).unwrap();
            prop_assert!(axes.complement().iter().all(|axis| here.get(axis) == there.get(axis)));
        }
    }

    #[test]
    fn a_group_and_its_complement_share_one_rank(
        (mesh, rank) in mesh_and_rank(),
        axes in any_axes(),
    ) {
        let across = mesh.group(rank, axes.complement()).unwrap();
        let both: Vec<usize> = mesh
            .group(rank, axes)
            .unwrap()
            .into_iter()
            .filter(|member| across.binary_search(member).is_ok())
            .collect();
        prop_assert_eq!(both, [rank]);
    }

    #[test]
    fn tp_is_innermost((mesh, rank) in mesh_and_rank()) {
        let group = mesh.group(rank, Axis::Tp).unwrap();
        prop_assert!(group.windows(2).all(|pair| pair[1] == pair[0] + 1));
        prop_assert_eq!(group[0] % mesh.size(Axis::Tp), 0);
    }

    #[test]
    fn inactive_axes_change_no_group((mesh, rank) in mesh_and_rank(), axes in any_axes()) {
        prop_assert_eq!(
            mesh.group(rank, axes).unwrap(),
            mesh.group(rank, axes.intersection(mesh.active())).unwrap()
        );
    }

    #[test]
    fn expert_groups_tile_the_inner_axes(
        (mesh, rank) in mesh_and_rank(),
        choice in any::<prop::sample::Index>(),
    ) {
        let inner = AxisSet::of([Axis::DpShard, Axis::Cp, Axis::Tp]);
        let over = mesh.size_of(inner);
        let divisors: Vec<usize> = (1..=over).filter(|ep| over.is_multiple_of(*ep)).collect();
        let mesh = mesh.with_ep(divisors[choice.index(divisors.len())]).unwrap();
        prop_assert_eq!(mesh.ep() * mesh.efsdp(), over);

        let experts = mesh.expert_group(rank).unwrap();
        let shards = mesh.expert_shard_group(rank).unwrap();
        prop_assert_eq!(experts.len(), mesh.ep());
        prop_assert_eq!(shards.len(), mesh.efsdp());
        prop_assert_eq!(experts[mesh.expert_index(rank).unwrap()], rank);
        prop_assert_eq!(shards[mesh.expert_shard_index(rank).unwrap()], rank);
        prop_assert!(experts.windows(2).all(|pair| pair[1] == pair[0] + 1));

        // The groups of one kind, over all members of a group of the other kind, cover the inner axes.
        let block = mesh.group(rank, inner).unwrap();
        let mut by_shards: Vec<usize> =
            shards.iter().flat_map(|&shard| mesh.expert_group(shard).unwrap()).collect();
        by_shards.sort_unstable();
        prop_assert_eq!(&by_shards, &block);
        let mut by_experts: Vec<usize> =
            experts.iter().flat_map(|&expert| mesh.expert_shard_group(expert).unwrap()).collect();
        by_experts.sort_unstable();
        prop_assert_eq!(&by_experts, &block);
    }

    #[test]
    fn meshes_round_trip_through_json((mesh, _) in mesh_and_rank()) {
        let json = serde_json::to_string(&mesh).unwrap();
        prop_assert_eq!(serde_json::from_str::<Mesh>(&json).unwrap(), mesh);
    }
}

#[test]
fn meshes_are_written_by_their_active_axes() {
    let mesh = Mesh::new(&[(Axis::Tp, 2), (Axis::Pp, 2), (Axis::DpShard, 4)]).unwrap();
    assert_eq!(mesh.to_string(), "pp2 x dp_shard4 x tp2");
    assert_eq!(
        mesh.clone().with_ep(4).unwrap().to_string(),
        "pp2 x dp_shard4 x tp2 (ep4)"
    );
    assert_eq!(Mesh::single().to_string(), "1 rank");
    assert_eq!(
        serde_json::to_string(&mesh).unwrap(),
        r#"{"dp_outer":1,"pp":2,"dp_replicate":1,"dp_shard":4,"cp":1,"tp":2,"ep":1}"#
    );
}

#[test]
fn invalid_meshes_are_rejected() {
    assert_eq!(
        Mesh::new(&[(Axis::Cp, 0)]),
        Err(MeshError::EmptyAxis { axis: Axis::Cp })
    );
    assert_eq!(
        Mesh::new(&[(Axis::Cp, 2), (Axis::Cp, 2)]),
        Err(MeshError::DuplicateAxis { axis: Axis::Cp })
    );
    assert!(matches!(
        Mesh::new(&[(Axis::Pp, usize::MAX), (Axis::Tp, 2)]),
        Err(MeshError::TooManyRanks { .. })
    ));
    let mesh = Mesh::new(&[(Axis::Pp, 3), (Axis::DpShard, 4)]).unwrap();
    for ep in [0, 3, 8] {
        assert_eq!(
            mesh.clone().with_ep(ep),
            Err(MeshError::EpNotDivisor { ep, over: 4 })
        );
    }
}

#[test]
fn ranks_and_coordinates_out_of_range_are_rejected() {
    let mesh = Mesh::new(&[(Axis::Pp, 2), (Axis::Tp, 2)]).unwrap();
    let outside = MeshError::RankOutOfRange {
        rank: 4,
        world_size: 4,
    };
    assert_eq!(mesh.coordinates(4), Err(outside.clone()));
    assert_eq!(mesh.group(4, Axis::Tp), Err(outside.clone()));
    assert_eq!(mesh.expert_group(4), Err(outside));
    assert_eq!(
        mesh.rank_at(&Coordinates::default().with(Axis::Tp, 2)),
        Err(MeshError::CoordinateOutOfRange {
            axis: Axis::Tp,
            coordinate: 2,
            size: 2
        })
    );
}

#[test]
fn sets_with_the_same_groups_have_one_canonical_form() {
    let mesh = Mesh::new(&[(Axis::DpReplicate, 2), (Axis::DpShard, 2), (Axis::Tp, 2)]).unwrap();
    let inner = AxisSet::of([Axis::DpShard, Axis::Tp]);
    let both = AxisSet::of([Axis::Efsdp, Axis::Ep]);
    let over = mesh.clone().with_ep(2).unwrap();
    assert_eq!(over.canonical(both), inner);
    assert_eq!(over.canonical(Axis::Ep), Axis::Ep.into());
    assert_eq!(over.group(5, Axis::Ep).unwrap(), [4, 5]);
    assert_eq!(over.group(5, Axis::Efsdp).unwrap(), [5, 7]);
    // If all ranks hold the same experts, or all different ones, only one expert axis is active.
    assert_eq!(mesh.canonical(Axis::Efsdp), inner);
    assert_eq!(mesh.with_ep(4).unwrap().canonical(both), inner);
    let mixed = AxisSet::of([Axis::Ep, Axis::Tp]);
    assert!(matches!(
        over.group(0, mixed),
        Err(MeshError::MixedAxes { .. })
    ));
}
