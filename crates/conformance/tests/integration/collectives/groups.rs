//! Several groups on one mesh: two replicas, each of two shards.

use std::rc::Rc;
use std::time::{Duration, Instant};

use tch::Kind;
use trainyard_conformance::{Case, Outcome, Rank, within};
use trainyard_mesh::{Axis, AxisSet, Mesh};
use trainyard_torch::{Group, P2pOp, ReduceOp, Result, Work, World};
use trainyard_trace::{Ledger, Purpose};

use super::pattern::{assert_same, room, whole};

pub const CASES: &[Case] = &[
    Case {
        name: "a_group_reduces_over_its_own_members_only",
        run: own_members,
    },
    Case {
        name: "peers_are_indices_in_the_group",
        run: peers,
    },
    Case {
        name: "groups_are_created_once_and_quickly",
        run: cached,
    },
    Case {
        name: "an_axis_of_one_is_a_group_of_one",
        run: alone,
    },
    Case {
        name: "groups_work_concurrently",
        run: side_by_side,
    },
    Case {
        name: "a_broken_group_does_not_affect_the_others",
        run: broken,
    },
];

const PURPOSE: Purpose = Purpose::Parameter;
const TIMEOUT: Duration = Duration::from_secs(30);

fn world(rank: &Rank) -> Result<Rc<World>> {
    let mesh = Mesh::new(&[(Axis::DpReplicate, 2), (Axis::DpShard, 2)])?;
    rank.join(mesh, Ledger::new(rank.index()), TIMEOUT)
}

/// Sets of axes, and the ranks that differ from `rank` along them; `dp_shard` is the inner axis.
fn members(rank: usize) -> [(AxisSet, Vec<usize>); 3] {
    [
        (Axis::DpReplicate.into(), vec![rank % 2, rank % 2 + 2]),
        (Axis::DpShard.into(), vec![rank / 2 * 2, rank / 2 * 2 + 1]),
        (AxisSet::ALL, vec![0, 1, 2, 3]),
    ]
}

/// The sum of the inputs of these ranks.
fn sum_over(ranks: &[usize], length: i64) -> tch::Tensor {
    let factor: i64 = ranks.iter().map(|&rank| rank as i64 + 1).sum();
    whole(0, length, Kind::Int64) * factor
}

fn assert_reduces(rank: &Rank, group: &Group, members: &[usize]) -> Result<()> {
    for op in [ReduceOp::Sum, ReduceOp::Max] {
        let tensor = whole(rank.index(), 1001, Kind::Int64);
        group.all_reduce(&tensor, op, PURPOSE)?.wait()?;
        let expected = match op {
            ReduceOp::Max => whole(members[members.len() - 1], 1001, Kind::Int64),
            _ => sum_over(members, 1001),
        };
        assert_same(
            &tensor,
            &expected,
            &format!("{op:?} along {}", group.name()),
        );
    }
    Ok(())
}

fn own_members(rank: &Rank) -> Outcome {
    let world = world(rank)?;
    for (axes, members) in members(rank.index()) {
        let group = world.group(axes)?;
        assert_eq!(group.size(), members.len());
        assert_eq!(members[group.index()], rank.index());
        assert_reduces(rank, &group, &members)?;
    }
    assert_eq!(world.group(Axis::DpShard)?.name(), "dp_shard");
    assert_eq!(world.world_group()?.name(), "dp_replicate+dp_shard");
    Ok(())
}

fn peers(rank: &Rank) -> Outcome {
    let world = world(rank)?;
    for axis in [Axis::DpReplicate, Axis::DpShard] {
        let group = world.group(axis)?;
        let (_, members) = members(rank.index())
            .into_iter()
            .find(|(axes, _)| *axes == axis.into())
            .ok_or("axis")?;
        let peer = 1 - group.index();
        let (sent, out) = (whole(rank.index(), 9, Kind::Float), room(9, Kind::Float));
        group
            .batch_send_recv(
                &[P2pOp::Send(&sent, peer), P2pOp::Recv(&out, peer)],
                0,
                PURPOSE,
            )?
            .wait()?;
        assert_same(&out, &whole(members[peer], 9, Kind::Float), "message");
        for (root, &member) in members.iter().enumerate().take(2) {
            let tensor = whole(rank.index(), 9, Kind::Float);
            group.broadcast(&tensor, root, PURPOSE)?.wait()?;
            assert_same(&tensor, &whole(member, 9, Kind::Float), "broadcast");
        }
    }
    Ok(())
}

fn cached(rank: &Rank) -> Outcome {
    let world = world(rank)?;
    rank.barrier()?;
    within(
        Duration::from_secs(1),
        "forming three groups",
        || -> Result<()> {
            for (axes, _) in members(rank.index()) {
                world.group(axes)?;
            }
            Ok(())
        },
    )?;
    let group = world.group(Axis::DpShard)?;
    group.barrier()?.wait()?;
    let asked = Instant::now();
    for _ in 0..1000 {
        world.group(Axis::DpShard)?;
    }
    assert!(
        asked.elapsed() < Duration::from_millis(100),
        "{:?}",
        asked.elapsed()
    );
    // It is the same group, so its sequence numbers continue.
    world
        .group(AxisSet::of([Axis::DpShard, Axis::Tp]))?
        .barrier()?
        .wait()?;
    let events = world.ledger().events();
    let sequences: Vec<u64> = events.collectives.iter().map(|c| c.sequence).collect();
    assert_eq!(sequences, [0, 1]);
    Ok(())
}

fn alone(rank: &Rank) -> Outcome {
    let world = world(rank)?;
    let group = world.group(AxisSet::of([Axis::Tp, Axis::Cp]))?;
    assert_eq!((group.index(), group.size()), (0, 1));
    let (tensor, out) = (whole(rank.index(), 9, Kind::Float), room(9, Kind::Float));
    group.all_reduce(&tensor, ReduceOp::Mean, PURPOSE)?.wait()?;
    group.all_gather(&out, &tensor, PURPOSE)?.wait()?;
    group.barrier()?.wait()?;
    assert_same(&out, &whole(rank.index(), 9, Kind::Float), "own");
    assert_eq!(
        world.ledger().totals().all_collectives().count,
        0,
        "nothing was communicated"
    );
    Ok(())
}

fn side_by_side(rank: &Rank) -> Outcome {
    let world = world(rank)?;
    let groups = members(rank.index()).map(|(axes, members)| (world.group(axes), members));
    let mut under_way = Vec::new();
    for _ in 0..10 {
        for (group, members) in &groups {
            let group = group.as_ref().map_err(|e| e.to_string())?;
            let tensor = whole(rank.index(), 20_001, Kind::Int64);
            under_way.push((
                group.all_reduce(&tensor, ReduceOp::Sum, PURPOSE)?,
                tensor,
                members,
            ));
        }
    }
    for (work, tensor, members) in under_way {
        work.wait()?;
        assert_same(&tensor, &sum_over(members, 20_001), "sum");
    }
    Ok(())
}

fn broken(rank: &Rank) -> Outcome {
    let world = world(rank)?;
    let [replicas, shards, all] = members(rank.index());
    let (first, second) = (world.group(replicas.0)?, world.group(shards.0)?);
    rank.barrier()?;
    first.abort();
    let tensor = whole(rank.index(), 64, Kind::Float);
    // Gloo fails when the caller waits, NCCL at once.
    let reduced = first.all_reduce(&tensor, ReduceOp::Sum, PURPOSE);
    assert!(reduced.and_then(Work::wait).is_err());
    rank.barrier()?;
    assert_reduces(rank, &second, &shards.1)?;
    // The store still works: a new group can be created.
    assert_reduces(rank, &world.group(all.0)?, &all.1)?;
    Ok(())
}
