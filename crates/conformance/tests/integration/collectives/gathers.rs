//! All-gather, broadcast, gather, scatter and barrier.

use tch::{Kind, Tensor};
use trainyard_conformance::{Outcome, Rank};
use trainyard_trace::Purpose;

use super::pattern::{KINDS, LARGE, assert_same, irregular, room, whole};

const PURPOSE: Purpose = Purpose::Parameter;

/// Numbers of elements of one rank's shard.
const PARTS: [i64; 6] = [0, 1, 3, 64, 1001, LARGE];

fn side_by_side(size: usize, part: i64, kind: Kind) -> Tensor {
    let parts: Vec<Tensor> = (0..size).map(|rank| whole(rank, part, kind)).collect();
    Tensor::cat(&parts, 0)
}

pub fn all_gather(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for kind in KINDS {
        for part in PARTS {
            let (input, out) = (
                whole(rank.index(), part, kind),
                room(part * rank.size() as i64, kind),
            );
            group.all_gather(&out, &input, PURPOSE)?.wait()?;
            assert_same(
                &out,
                &side_by_side(rank.size(), part, kind),
                &format!("{kind:?} in parts of {part}"),
            );
            assert_same(&input, &whole(rank.index(), part, kind), "the input");
        }
    }
    Ok(())
}

pub fn all_gather_in_place(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for part in [1, 64, LARGE] {
        let out = room(part * rank.size() as i64, Kind::Float);
        let mut own = out.narrow(0, rank.index() as i64 * part, part);
        own.copy_(&whole(rank.index(), part, Kind::Float));
        group.all_gather(&out, &own, PURPOSE)?.wait()?;
        assert_same(
            &out,
            &side_by_side(rank.size(), part, Kind::Float),
            &format!("parts of {part}"),
        );
    }
    Ok(())
}

pub fn broadcast(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for root in 0..rank.size() {
        for kind in KINDS {
            for length in [1, 5, 1001, LARGE] {
                let tensor = irregular(rank.index() + 1, length, kind);
                group.broadcast(&tensor, root, PURPOSE)?.wait()?;
                let what = format!("{kind:?} of {length} from {root}");
                assert_same(&tensor, &irregular(root + 1, length, kind), &what);
            }
        }
    }
    Ok(())
}

pub fn gather(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for root in 0..rank.size() {
        for kind in KINDS {
            for length in [1, 5, LARGE] {
                let rooms = if rank.index() == root { rank.size() } else { 0 };
                let outs: Vec<Tensor> = (0..rooms).map(|_| room(length, kind)).collect();
                group
                    .gather(&outs, &irregular(rank.index(), length, kind), root, PURPOSE)?
                    .wait()?;
                for (from, out) in outs.iter().enumerate() {
                    let what = format!("{kind:?} of {length} from {from} at {root}");
                    assert_same(out, &irregular(from, length, kind), &what);
                }
            }
        }
    }
    Ok(())
}

pub fn scatter(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for root in 0..rank.size() {
        for kind in KINDS {
            for length in [1, 5, LARGE] {
                let inputs: Vec<Tensor> = if rank.index() == root {
                    (0..rank.size())
                        .map(|to| irregular(10 * root + to, length, kind))
                        .collect()
                } else {
                    Vec::new()
                };
                let out = room(length, kind);
                group.scatter(&out, &inputs, root, PURPOSE)?.wait()?;
                let what = format!("{kind:?} of {length} from {root}");
                assert_same(
                    &out,
                    &irregular(10 * root + rank.index(), length, kind),
                    &what,
                );
            }
        }
    }
    Ok(())
}

/// No rank leaves before the last one has entered.
pub fn barrier(rank: &Rank) -> Outcome {
    let world = rank.world()?;
    let group = world.world_group()?;
    for late in 0..rank.size() {
        rank.barrier()?;
        if rank.index() == late {
            // This sleep does not synchronize; it makes the rank late.
            std::thread::sleep(std::time::Duration::from_millis(30));
        }
        let came = world.ledger().now_ns();
        group.barrier()?.wait()?;
        let left = world.ledger().now_ns();
        let last = rank.all_gather(&came)?.into_iter().max().unwrap_or(0);
        assert!(
            left >= last,
            "left {} ns before the last had come",
            last - left
        );
    }
    Ok(())
}
