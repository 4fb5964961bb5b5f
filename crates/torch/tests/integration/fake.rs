//! A rank of a dry run: collectives are recorded and not sent.

use trainyard_mesh::{Axis, AxisSet, Mesh};
use trainyard_torch::{Device, Kind, P2pOp, ReduceOp, Tensor, WireBytes, World, meta};
use trainyard_trace::{CollectiveKind, Ledger, Purpose, sent_bytes};

const SIZES: [(Axis, usize); 5] = [
    (Axis::Pp, 8),
    (Axis::DpReplicate, 4),
    (Axis::DpShard, 32),
    (Axis::Cp, 2),
    (Axis::Tp, 8),
];

fn world(rank: usize) -> World {
    World::fake(Mesh::new(&SIZES).unwrap(), rank, Ledger::recording(rank)).unwrap()
}

/// All sets of axes.
fn axis_sets() -> impl Iterator<Item = AxisSet> {
    (0..1u32 << SIZES.len()).map(|bits| {
        let chosen =
            |(index, (axis, _)): (usize, &(Axis, usize))| (bits >> index & 1 == 1).then_some(*axis);
        SIZES.iter().enumerate().filter_map(chosen).collect()
    })
}

#[test]
fn groups_along_any_axes_of_16384_ranks_are_created_at_once() {
    for rank in [0, 9_999, 16_383] {
        let world = world(rank);
        assert_eq!((world.size(), world.rank()), (16_384, rank));
        assert!(world.is_fake());
        for axes in axis_sets() {
            let group = world.group(axes).unwrap();
            assert_eq!(group.size(), world.mesh().size_of(axes));
            let members = world.mesh().group(rank, axes).unwrap();
            assert_eq!(members[group.index()], rank);
        }
        assert_eq!(world.world_group().unwrap().size(), 16_384);
        assert_eq!(world.world_group().unwrap().index(), rank);
    }
}

#[test]
fn a_rank_outside_the_mesh_is_rejected() {
    let mesh = Mesh::new(&SIZES).unwrap();
    assert!(World::fake(mesh, 16_384, Ledger::new(16_384)).is_err());
}

#[test]
fn axes_of_size_one_do_not_create_separate_groups() {
    let mesh = Mesh::new(&[(Axis::DpShard, 4)]).unwrap();
    let world = World::fake(mesh, 1, Ledger::new(1)).unwrap();
    let plain = world.group(Axis::DpShard).unwrap();
    let both = world.group(AxisSet::of([Axis::DpShard, Axis::Cp])).unwrap();
    assert_eq!(plain.name(), both.name());
    assert_eq!(world.group(Axis::Tp).unwrap().size(), 1);
}

#[test]
fn every_collective_is_recorded_with_its_purpose_and_nothing_is_sent() {
    let world = world(5);
    let group = world.group(Axis::Tp).unwrap();
    let (size, root) = (group.size() as i64, 0);
    let floats = |count: i64| Tensor::ones([count], (Kind::Float, Device::Cpu));
    let (shard, full) = (floats(100), floats(100 * size));
    let splits = vec![100; size as usize];
    let purpose = Purpose::Activation;
    let works = [
        group.all_reduce(&full, ReduceOp::Sum, purpose),
        group.all_gather(&full, &shard, purpose),
        group.reduce_scatter(&shard, &full, ReduceOp::Mean, purpose),
        group.all_to_all(&full, &full, &splits, &splits, purpose),
        group.broadcast(&shard, root, purpose),
        group.reduce(&shard, root, ReduceOp::Max, purpose),
        group.gather(&[], &shard, root, purpose),
        group.scatter(&shard, &[], root, purpose),
        group.send(&shard, 1, 0, purpose),
        group.recv(&shard, 1, 0, purpose),
        group.batch_send_recv(&[P2pOp::Send(&shard, 2), P2pOp::Recv(&full, 3)], 1, purpose),
        group.barrier(),
    ];
    for work in works {
        let work = work.unwrap();
        assert!(work.is_done());
        work.wait().unwrap();
    }

    let totals = world.ledger().totals();
    for kind in CollectiveKind::ALL {
        let expected = match kind {
            CollectiveKind::Send => 2,
            // Only other programs issue these.
            CollectiveKind::Other => 0,
            _ => 1,
        };
        assert_eq!(totals.of_kind(kind).count, expected, "{kind}");
    }
    let sent = |kind| totals.of_kind(kind).sent_bytes;
    let closed = |kind, tensor: &Tensor| sent_bytes(kind, 8, 4 * tensor.numel() as u64);
    for (kind, handed_in) in [
        (CollectiveKind::AllReduce, &full),
        (CollectiveKind::AllGather, &shard),
        (CollectiveKind::ReduceScatter, &full),
        (CollectiveKind::AllToAll, &full),
        (CollectiveKind::Reduce, &shard),
        (CollectiveKind::Gather, &shard),
    ] {
        assert_eq!(sent(kind), closed(kind, handed_in), "{kind}");
    }
    assert_eq!(sent(CollectiveKind::Broadcast), 0, "this is not the root");
    assert_eq!(sent(CollectiveKind::Send), 800);
    assert_eq!(totals.of_purpose(purpose).count, 11);
    assert_eq!(totals.of_purpose(Purpose::Control).count, 1, "the barrier");

    assert_eq!(group.wire_bytes(), WireBytes::default());
    assert_eq!(f64::try_from(full.sum(Kind::Double)).unwrap(), 100.0 * 8.0);
    // Collectives have the same sequence numbers on every rank; sends and receives, which involve two ranks, count
    // separately.
    let (messages, collectives): (Vec<_>, Vec<_>) = world
        .ledger()
        .events()
        .collectives
        .into_iter()
        .partition(|each| matches!(each.kind, CollectiveKind::Send | CollectiveKind::Recv));
    for (events, count) in [(collectives, 9), (messages, 3)] {
        let numbers: Vec<u64> = events.iter().map(|each| each.sequence).collect();
        assert_eq!(numbers, (0..count).collect::<Vec<_>>());
    }
}

#[test]
fn an_all_reduce_of_a_meta_gradient_sends_the_bytes_of_the_formula() {
    let world = world(77);
    let gradient = meta::empty(&[1 << 34], Kind::BFloat16).unwrap();
    let world_group = world.world_group().unwrap();
    world_group
        .all_reduce(&gradient, ReduceOp::Sum, Purpose::Gradient)
        .unwrap()
        .wait()
        .unwrap();
    let total = world.ledger().totals().of_purpose(Purpose::Gradient);
    let bytes = 1u64 << 35;
    assert_eq!((total.count, total.payload_bytes), (1, bytes));
    let closed = sent_bytes(CollectiveKind::AllReduce, 16_384, bytes);
    assert_eq!(total.sent_bytes, closed);
}

#[test]
fn invalid_arguments_are_rejected_as_in_a_real_group() {
    let world = world(0);
    let group = world.group(Axis::Cp).unwrap();
    let tensor = Tensor::ones([4, 4], (Kind::Float, Device::Cpu));
    let purpose = Purpose::State;
    let errors = [
        group.all_gather(&tensor, &tensor, purpose),
        group.all_reduce(&tensor.tr(), ReduceOp::Sum, purpose),
        group.broadcast(&tensor, 2, purpose),
        group.send(&tensor, 0, 0, purpose),
        group.all_to_all(&tensor, &tensor, &[1, 1], &[2, 2], purpose),
    ];
    for error in errors {
        let message = error.err().unwrap().to_string();
        assert!(message.starts_with("rank 0: "), "{message}");
        assert!(message.contains("group cp of 2"), "{message}");
    }
    assert_eq!(world.ledger().totals().all_collectives().count, 0);
}
