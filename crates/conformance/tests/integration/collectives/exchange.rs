//! All-to-all, send and recv.

use tch::{Kind, Tensor};
use trainyard_conformance::{Case, Outcome, Rank};
use trainyard_torch::{P2pOp, ReduceOp, Work};
use trainyard_trace::Purpose;

use super::gathers;
use super::pattern::{KINDS, LARGE, assert_same, irregular, room, whole};

pub const CASES_WITH_GATHERS: &[Case] = &[
    Case {
        name: "all_gather_collects_all_shards",
        run: gathers::all_gather,
    },
    Case {
        name: "all_gather_works_in_place",
        run: gathers::all_gather_in_place,
    },
    Case {
        name: "broadcast_from_every_root",
        run: gathers::broadcast,
    },
    Case {
        name: "gather_to_every_root",
        run: gathers::gather,
    },
    Case {
        name: "scatter_from_every_root",
        run: gathers::scatter,
    },
    Case {
        name: "a_barrier_waits_for_all_ranks",
        run: gathers::barrier,
    },
    Case {
        name: "all_to_all_with_even_splits",
        run: even_splits,
    },
    Case {
        name: "all_to_all_with_uneven_and_empty_splits",
        run: uneven_splits,
    },
    Case {
        name: "all_to_all_of_zero_elements",
        run: empty_splits,
    },
    Case {
        name: "sends_around_the_ring_in_both_directions",
        run: ring,
    },
    Case {
        name: "batched_sends_and_receives_do_not_deadlock",
        run: batches,
    },
    Case {
        name: "sends_keep_their_order_and_tag",
        run: order_and_tags,
    },
    Case {
        name: "sends_between_some_ranks_do_not_disturb_collectives",
        run: messages_of_some,
    },
];

const PURPOSE: Purpose = Purpose::Dispatch;

/// What `from` sends to `to`: rows of three values, sender, receiver and index.
fn rows(from: usize, to: usize, num_rows: i64, kind: Kind) -> Tensor {
    let place = whole(0, num_rows * 3, Kind::Int64);
    (place + (10 * from + 40 * to) as i64)
        .to_kind(kind)
        .view([num_rows, 3])
}

/// An all-to-all in which `from` sends `split(from, to)` rows to `to`.
fn exchange(rank: &Rank, kind: Kind, split: impl Fn(usize, usize) -> i64) -> Outcome {
    let group = rank.world()?.world_group()?;
    let (me, size) = (rank.index(), rank.size());
    let sent: Vec<Tensor> = (0..size)
        .map(|to| rows(me, to, split(me, to), kind))
        .collect();
    let expected: Vec<Tensor> = (0..size)
        .map(|from| rows(from, me, split(from, me), kind))
        .collect();
    let (input, expected) = (Tensor::cat(&sent, 0), Tensor::cat(&expected, 0));
    let out = room(expected.numel() as i64, kind).view_as(&expected);
    let in_splits: Vec<i64> = (0..size).map(|to| split(me, to)).collect();
    let out_splits: Vec<i64> = (0..size).map(|from| split(from, me)).collect();
    group
        .all_to_all(&out, &input, &out_splits, &in_splits, PURPOSE)?
        .wait()?;
    assert_same(&out, &expected, &format!("{kind:?}"));
    Ok(())
}

fn even_splits(rank: &Rank) -> Outcome {
    for kind in KINDS {
        exchange(rank, kind, |_, _| 5)?;
    }
    exchange(rank, Kind::Float, |_, _| LARGE / 9)
}

fn uneven_splits(rank: &Rank) -> Outcome {
    for kind in KINDS {
        exchange(rank, kind, |from, to| ((from + 2 * to) % 4) as i64)?;
        exchange(
            rank,
            kind,
            |from, to| if (from, to) == (0, 1) { 17 } else { 0 },
        )?;
    }
    exchange(rank, Kind::Float, |from, to| (from * 100_003 + to) as i64)
}

fn empty_splits(rank: &Rank) -> Outcome {
    exchange(rank, Kind::Float, |_, _| 0)
}

fn ring(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    let (me, size) = (rank.index(), rank.size());
    for kind in KINDS {
        for length in [1, 1001, LARGE] {
            for step in [1, size - 1] {
                let (to, from) = ((me + step) % size, (me + size - step) % size);
                let (out, sent) = (room(length, kind), irregular(me, length, kind));
                let arriving = group.recv(&out, from, 0, PURPOSE)?;
                let leaving = group.send(&sent, to, 0, PURPOSE)?;
                leaving.wait()?;
                arriving.wait()?;
                assert_same(
                    &out,
                    &irregular(from, length, kind),
                    &format!("{kind:?} of {length} from {from}"),
                );
            }
        }
    }
    Ok(())
}

fn batches(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    let others: Vec<usize> = (0..rank.size())
        .filter(|&peer| peer != rank.index())
        .collect();
    let sent = irregular(rank.index(), LARGE, Kind::Float);
    let outs: Vec<Tensor> = others.iter().map(|_| room(LARGE, Kind::Float)).collect();
    // All ranks send first: one operation at a time would deadlock.
    let mut messages: Vec<P2pOp> = others
        .iter()
        .map(|&peer| P2pOp::Send(&sent, peer))
        .collect();
    messages.extend(
        outs.iter()
            .zip(&others)
            .map(|(out, &peer)| P2pOp::Recv(out, peer)),
    );
    group.batch_send_recv(&messages, 7, PURPOSE)?.wait()?;
    for (out, &peer) in outs.iter().zip(&others) {
        assert_same(
            out,
            &irregular(peer, LARGE, Kind::Float),
            &format!("from {peer}"),
        );
    }
    group.batch_send_recv(&[], 7, PURPOSE)?.wait()?;
    Ok(())
}

fn order_and_tags(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu("NCCL matches messages by order and ignores tags") {
        return Ok(());
    }
    let group = rank.world()?.world_group()?;
    const NUM: usize = 10;
    match rank.index() {
        0 => {
            // All are posted before any wait, because a send may last until it is received.
            let tensors: Vec<Tensor> = (0..2 * NUM)
                .map(|n| irregular(n, 33, Kind::Float))
                .collect();
            let mut works = Vec::new();
            for (number, tensor) in tensors.iter().enumerate() {
                works.push(group.send(tensor, 1, (number / NUM) as u16, PURPOSE)?);
            }
            works.into_iter().try_for_each(Work::wait)?;
        }
        1 => {
            // The second tag is received first.
            for number in (NUM..2 * NUM).chain(0..NUM) {
                let out = room(33, Kind::Float);
                group
                    .recv(&out, 0, (number / NUM) as u16, PURPOSE)?
                    .wait()?;
                assert_same(
                    &out,
                    &irregular(number, 33, Kind::Float),
                    &format!("message {number}"),
                );
            }
        }
        _ => {}
    }
    Ok(())
}

/// Ranks that exchange in pairs have posted more operations than others when the next collective starts.
fn messages_of_some(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for round in 0..3 {
        match rank.index() {
            0 => group
                .send(&irregular(round, 9, Kind::Float), 1, 0, PURPOSE)?
                .wait()?,
            1 => {
                let out = room(9, Kind::Float);
                group.recv(&out, 0, 0, PURPOSE)?.wait()?;
                assert_same(&out, &irregular(round, 9, Kind::Float), "message");
            }
            _ => {}
        }
        let tensor = whole(rank.index(), 1001, Kind::Int64);
        group.all_reduce(&tensor, ReduceOp::Sum, PURPOSE)?.wait()?;
        let factor = (rank.size() * (rank.size() + 1) / 2) as i64;
        assert_same(&tensor, &(whole(0, 1001, Kind::Int64) * factor), "sum");
    }
    Ok(())
}
