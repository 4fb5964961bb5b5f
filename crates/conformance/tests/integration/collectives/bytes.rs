//! The ledger's record of every collective, compared with the closed form and with the bytes that were transferred.

use std::time::{Duration, Instant};

use tch::{Kind, Tensor};
use trainyard_conformance::{Case, Outcome, Rank};
use trainyard_torch::{Group, P2pOp, ReduceOp, Result};
use trainyard_trace::{CollectiveKind, Purpose, Total};

use super::pattern::{LARGE, room, whole};

/// One collective, ready to be called.
type Call = Box<dyn Fn(&Group) -> Result<()>>;

pub const CASES: &[Case] = &[
    Case {
        name: "small_collectives_are_counted_in_closed_form",
        run: small,
    },
    Case {
        name: "large_collectives_agree_with_the_counters_of_the_kernel",
        run: large,
    },
    Case {
        name: "the_ledger_records_type_purpose_and_sequence",
        run: records,
    },
];

const PURPOSE: Purpose = Purpose::State;

/// One collective, and what the ledger of one rank must contain for it.
struct Expected {
    kind: CollectiveKind,
    payload: u64,
    sent: u64,
}

/// The size of chunk `index` of `elements`, divided as `torch.chunk` does.
fn chunk(elements: u64, size: u64, index: u64) -> u64 {
    let part = elements.div_ceil(size);
    (part * (index + 1)).min(elements) - (part * index).min(elements)
}

/// Every collective once, with `length` float32 elements per rank.
fn every_collective(rank: &Rank, length: i64) -> Vec<(Expected, Call)> {
    let (me, size) = (rank.index(), rank.size());
    let (n, elements) = (size as u64, length as u64);
    let bytes = 4 * elements;
    let own = 4 * chunk(elements, n, me as u64);
    let others = n - 1;
    let is_root = |yes: u64, no: u64| if me == 0 { yes } else { no };
    let input = move || whole(me, length, Kind::Float);
    let all = move || room(length * size as i64, Kind::Float);
    let each = move |count: usize| {
        (0..count)
            .map(|_| room(length, Kind::Float))
            .collect::<Vec<Tensor>>()
    };
    let at_root = move || each(if me == 0 { size } else { 0 });
    let even = vec![length; size];
    let (next, previous) = ((me + 1) % size, (me + size - 1) % size);
    let expected = |kind, payload, sent| Expected {
        kind,
        payload,
        sent,
    };
    use CollectiveKind as K;
    vec![
        // One chunk to each peer, and the own chunk, reduced, to each peer.
        (
            expected(K::AllReduce, bytes, bytes - own + others * own),
            Box::new(move |g| g.all_reduce(&input(), ReduceOp::Sum, PURPOSE)?.wait()),
        ),
        (
            expected(K::AllGather, n * bytes, others * bytes),
            Box::new(move |g| g.all_gather(&all(), &input(), PURPOSE)?.wait()),
        ),
        (
            expected(K::ReduceScatter, n * bytes, others * bytes),
            Box::new(move |g| {
                g.reduce_scatter(&input(), &all(), ReduceOp::Sum, PURPOSE)?
                    .wait()
            }),
        ),
        (
            expected(K::AllToAll, n * bytes, others * bytes),
            Box::new(move |g| g.all_to_all(&all(), &all(), &even, &even, PURPOSE)?.wait()),
        ),
        (
            expected(K::Broadcast, bytes, is_root(others * bytes, 0)),
            Box::new(move |g| g.broadcast(&input(), 0, PURPOSE)?.wait()),
        ),
        (
            // A ring reduce-scatter that includes the root, then every chunk to the root.
            expected(
                K::Reduce,
                bytes,
                is_root((others * bytes).div_ceil(n), bytes),
            ),
            Box::new(move |g| g.reduce(&input(), 0, ReduceOp::Sum, PURPOSE)?.wait()),
        ),
        (
            expected(K::Gather, bytes, is_root(0, bytes)),
            Box::new(move |g| g.gather(&at_root(), &input(), 0, PURPOSE)?.wait()),
        ),
        (
            expected(K::Scatter, n * bytes, is_root(others * bytes, 0)),
            Box::new(move |g| g.scatter(&input(), &at_root(), 0, PURPOSE)?.wait()),
        ),
        (
            expected(K::Send, 2 * bytes, bytes),
            Box::new(move |g| {
                let (out, sent) = (room(length, Kind::Float), input());
                g.batch_send_recv(
                    &[P2pOp::Send(&sent, next), P2pOp::Recv(&out, previous)],
                    0,
                    PURPOSE,
                )?
                .wait()
            }),
        ),
    ]
}

/// What `body` records in the ledger under the purpose of these tests.
fn counted(
    group: &Group,
    body: impl FnOnce(&Group) -> Result<()>,
) -> Result<Vec<(CollectiveKind, Total)>> {
    let before = group.ledger().totals();
    body(group)?;
    let totals = group.ledger().totals() - before;
    let rows = totals
        .collectives
        .into_iter()
        .filter(|((_, purpose), _)| *purpose == PURPOSE);
    Ok(rows.map(|((kind, _), total)| (kind, total)).collect())
}

fn assert_counted(found: &[(CollectiveKind, Total)], expected: &Expected) {
    let total = Total {
        count: 1,
        payload_bytes: expected.payload,
        sent_bytes: expected.sent,
    };
    assert_eq!(found, [(expected.kind, total)]);
}

fn small(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for length in [5, 64, 1001] {
        for (expected, run) in every_collective(rank, length) {
            assert_counted(&counted(&group, run)?, &expected);
        }
    }
    // With fewer elements than ranks, the backend's own ring is used, whose chunks are rounded up.
    let tensor = whole(rank.index(), 1, Kind::Double);
    let found = counted(&group, |g| {
        g.all_reduce(&tensor, ReduceOp::Sum, PURPOSE)?.wait()
    })?;
    let n = rank.size() as u64;
    assert_counted(
        &found,
        &Expected {
            kind: CollectiveKind::AllReduce,
            payload: 8,
            sent: (8 * 2 * (n - 1)).div_ceil(n),
        },
    );
    let found = counted(&group, |g| g.barrier()?.wait())?;
    assert_eq!(found, []);
    assert_eq!(
        group
            .ledger()
            .totals()
            .of_kind(CollectiveKind::Barrier)
            .sent_bytes,
        0
    );
    Ok(())
}

/// Bytes sent by all ranks, by their ledgers and by the kernel.
fn large(rank: &Rank) -> Outcome {
    if rank
        .skips_on_gpu("NCCL does not send through sockets that this process can read counters of")
    {
        return Ok(());
    }
    let group = rank.world()?.world_group()?;
    for (expected, run) in every_collective(rank, LARGE) {
        group.barrier()?.wait()?;
        rank.barrier()?;
        let before = group.wire_bytes();
        assert_counted(&counted(&group, run)?, &expected);
        group.barrier()?.wait()?;
        rank.barrier()?;
        let wire = settled(|| group.wire_bytes().sent - before.sent);
        let received = group.wire_bytes().received - before.received;
        let facts = rank.all_gather(&[expected.sent, wire, received])?;
        let sum = |index: usize| facts.iter().map(|f| f[index]).sum::<u64>() as f64;
        let kind = expected.kind;
        for (index, what) in [(1, "sent"), (2, "received")] {
            let ratio = sum(index) / sum(0);
            assert!(
                (0.98..1.02).contains(&ratio),
                "{kind}: the kernel's {what} bytes are {ratio:.4} of the ledger's: {facts:?}"
            );
        }
        let is_direct = matches!(
            kind,
            CollectiveKind::AllReduce | CollectiveKind::AllGather | CollectiveKind::ReduceScatter
        );
        if is_direct {
            let ratio = wire as f64 / expected.sent as f64;
            assert!(
                (0.98..1.02).contains(&ratio),
                "{kind}: {wire} bytes on the wire, {} in the ledger",
                expected.sent
            );
        }
    }
    Ok(())
}

/// A byte counter of the kernel, after it has stopped changing: it may lag behind.
fn settled(read: impl Fn() -> u64) -> u64 {
    let started = Instant::now();
    let mut last = read();
    loop {
        std::thread::sleep(Duration::from_millis(60));
        let now = read();
        if now == last || started.elapsed() > Duration::from_secs(2) {
            return now;
        }
        last = now;
    }
}

fn records(rank: &Rank) -> Outcome {
    let world = rank.world()?;
    let group = world.world_group()?;
    for (number, kind) in [Kind::Float, Kind::BFloat16, Kind::Int64]
        .into_iter()
        .enumerate()
    {
        let work = group.all_reduce(
            &whole(rank.index(), 100, kind),
            ReduceOp::Sum,
            Purpose::Gradient,
        )?;
        assert_eq!(world.ledger().pending().len(), 1, "under way");
        work.wait()?;
        let events = world.ledger().events();
        let last = events.collectives.last().ok_or("nothing was written")?;
        assert_eq!(
            (last.sequence, last.group_size),
            (number as u64, rank.size())
        );
        assert_eq!(
            (last.kind, last.purpose),
            (CollectiveKind::AllReduce, Purpose::Gradient)
        );
        assert_eq!(last.dtype, ["float32", "bfloat16", "int64"][number]);
        assert_eq!(last.group, "dp_replicate");
        assert!(
            last.issued_ns <= last.started_ns && last.started_ns <= last.ended_ns,
            "{last:?}"
        );
        assert!(
            last.waited.is_some_and(|(began, ended)| began <= ended),
            "{last:?}"
        );
    }
    assert_eq!(world.ledger().pending(), []);
    Ok(())
}
