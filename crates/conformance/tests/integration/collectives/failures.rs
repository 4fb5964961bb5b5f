//! Failures: mismatched operands, missing peers, and aborted collectives.

use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use tch::{Kind, Tensor};
use trainyard_conformance::{Case, Outcome, Rank, device};
use trainyard_mesh::{Axis, Mesh};
use trainyard_torch::{
    Cause, CommunicationError, Group, ReduceOp, Result, TorchError, Work, World,
};
use trainyard_trace::{CollectiveKind, Ledger, Purpose};

use super::pattern::{assert_same, room, whole};

pub const CASES: &[Case] = &[
    Case {
        name: "wrong_operands_are_rejected_with_rank_and_operation",
        run: wrong_operands,
    },
    Case {
        name: "mismatched_types_are_rejected",
        run: wrong_types,
    },
    Case {
        name: "an_abort_ends_an_all_reduce",
        run: leave_all_reduce,
    },
    Case {
        name: "an_abort_ends_the_backends_own_all_reduce",
        run: leave_native,
    },
    Case {
        name: "an_abort_ends_a_recv",
        run: leave_message,
    },
    Case {
        name: "an_abort_ends_a_barrier",
        run: leave_barrier,
    },
    Case {
        name: "an_aborted_group_rejects_further_collectives",
        run: after_abort,
    },
    Case {
        name: "a_missing_peer_times_out",
        run: timeout,
    },
    Case {
        name: "a_missing_sender_times_out",
        run: message_timeout,
    },
    Case {
        name: "a_missing_peer_times_out_by_the_latest_timeout",
        run: changed_timeout,
    },
    Case {
        name: "a_peer_that_leaves_is_detected",
        run: lost_peer,
    },
    Case {
        name: "work_without_a_wait_completes",
        run: forgotten_work,
    },
];

const PURPOSE: Purpose = Purpose::Activation;

/// How soon an aborted rank must return.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Much longer than any of these cases, so that none of them ends by a timeout.
const LONG: Duration = Duration::from_secs(60);

/// Why a rank on a GPU gets no error to look at.
const ENDED_BY_WATCHDOG: &str =
    "the watchdog of NCCL ends the process; bench/gpu/abort measures it";

fn failure<T>(result: Result<T>) -> CommunicationError {
    match result {
        Err(TorchError::Communication(error)) => *error,
        Err(other) => panic!("not an error of communication: {other}"),
        Ok(_) => panic!("it was accepted"),
    }
}

fn joined(rank: &Rank, timeout: Duration) -> Result<Rc<World>> {
    let mesh = Mesh::new(&[(Axis::DpReplicate, rank.size())])?;
    rank.join(mesh, Ledger::new(rank.index()), timeout)
}

fn world_of(rank: &Rank, timeout: Duration) -> Result<Group> {
    joined(rank, timeout)?.world_group()
}

fn wrong_operands(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    let size = rank.size() as i64;
    group.barrier()?.wait()?;
    let (five, wrong) = (room(5, Kind::Float), room(5 * size + 1, Kind::Float));
    let slanted = Tensor::zeros([4, 6], (Kind::Float, device())).transpose(0, 1);
    let splits = vec![1; rank.size()];
    use CollectiveKind as K;
    let rejected: Vec<(CollectiveKind, Result<Work>)> = vec![
        (K::AllGather, group.all_gather(&wrong, &five, PURPOSE)),
        (
            K::ReduceScatter,
            group.reduce_scatter(&five, &wrong, ReduceOp::Sum, PURPOSE),
        ),
        (
            K::AllToAll,
            group.all_to_all(&five, &five, &splits, &splits, PURPOSE),
        ),
        (
            K::AllToAll,
            group.all_to_all(&five, &five, &[5], &[5], PURPOSE),
        ),
        (K::Broadcast, group.broadcast(&five, rank.size(), PURPOSE)),
        (
            K::Reduce,
            group.reduce(&five, rank.size(), ReduceOp::Sum, PURPOSE),
        ),
        (K::Gather, group.gather(&[five.copy()], &five, 0, PURPOSE)),
        (K::Scatter, group.scatter(&five, &[five.copy()], 0, PURPOSE)),
        (
            K::AllReduce,
            group.all_reduce(&slanted, ReduceOp::Sum, PURPOSE),
        ),
        (
            K::AllReduce,
            group.all_reduce(&slanted, ReduceOp::Max, PURPOSE),
        ),
        (K::Send, group.send(&five, rank.index(), 0, PURPOSE)),
        (K::Recv, group.recv(&five, rank.size(), 0, PURPOSE)),
    ];
    for (kind, result) in rejected {
        let error = failure(result);
        assert!(matches!(error.cause, Cause::Operands(_)), "{kind}: {error}");
        // Sends and receives have their own sequence numbers: there was one barrier and no send.
        let sequence = u64::from(!matches!(kind, K::Send | K::Recv));
        assert_eq!(
            (error.rank, error.kind, error.sequence),
            (rank.index(), kind, sequence)
        );
        assert_eq!(
            (error.group.as_str(), error.group_size),
            ("dp_replicate", rank.size())
        );
        let text = error.to_string();
        let who = format!(
            "rank {}: {kind} #{sequence} in group dp_replicate",
            rank.index()
        );
        assert!(text.starts_with(&who) && text.contains("Float["), "{text}");
    }
    still_works(rank, &group)
}

/// Matching sizes with different types are as dangerous, because bytes would be misinterpreted.
fn wrong_types(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    let size = rank.size() as i64;
    let (single, double) = (room(5, Kind::Float), room(5, Kind::Double));
    let (singles, doubles) = (room(5 * size, Kind::Float), room(5 * size, Kind::Double));
    let splits = vec![5; rank.size()];
    let (rooms, roots): (Vec<Tensor>, _) = match rank.index() {
        0 => ((0..size).map(|_| double.copy()).collect(), 0),
        _ => (Vec::new(), 0),
    };
    let mut rejected = vec![
        group.all_gather(&singles, &double, PURPOSE),
        group.reduce_scatter(&single, &doubles, ReduceOp::Sum, PURPOSE),
        group.all_to_all(&singles, &doubles, &splits, &splits, PURPOSE),
    ];
    if rank.index() == 0 {
        rejected.push(group.gather(&rooms, &single, roots, PURPOSE));
        rejected.push(group.scatter(&single, &rooms, roots, PURPOSE));
    }
    for result in rejected {
        let error = failure(result);
        assert!(matches!(error.cause, Cause::Operands(_)), "{error}");
    }
    still_works(rank, &group)
}

fn still_works(rank: &Rank, group: &Group) -> Outcome {
    let tensor = whole(rank.index(), 7, Kind::Int64);
    group.all_reduce(&tensor, ReduceOp::Max, PURPOSE)?.wait()?;
    assert_same(
        &tensor,
        &whole(rank.size() - 1, 7, Kind::Int64),
        "afterwards",
    );
    Ok(())
}

/// Rank 0 waits in a collective that no other rank enters, and another thread aborts the group.
fn leave(rank: &Rank, start: impl Fn(&Group) -> Result<Work>) -> Outcome {
    let group = world_of(rank, LONG)?;
    group.barrier()?.wait()?;
    if rank.index() == 0 {
        let work = start(&group)?;
        let other = group.clone();
        let aborting = thread::spawn(move || {
            // This sleep lets the other thread get into the backend; it must return from any other point too.
            thread::sleep(Duration::from_millis(200));
            let aborted = Instant::now();
            other.abort();
            aborted
        });
        let error = failure(work.wait());
        let aborted = aborting
            .join()
            .map_err(|_| "the aborting thread panicked")?;
        let took = aborted.elapsed();
        assert!(took < AT_ONCE, "returned {took:?} after the abort");
        assert_eq!(error.cause, Cause::Aborted, "{error}");
    }
    rank.barrier()?;
    if rank.index() != 0 {
        // A rank that comes later finds its peer gone and does not wait for it.
        let came = Instant::now();
        let tensor = whole(rank.index(), 64, Kind::Float);
        let error = failure(
            group
                .all_reduce(&tensor, ReduceOp::Sum, PURPOSE)
                .and_then(Work::wait),
        );
        assert!(
            came.elapsed() < AT_ONCE,
            "noticed after {:?}: {error}",
            came.elapsed()
        );
        assert!(matches!(error.cause, Cause::PeerLost { .. }), "{error}");
    }
    rank.barrier()?;
    Ok(())
}

fn leave_all_reduce(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu(ENDED_BY_WATCHDOG) {
        return Ok(());
    }
    leave(rank, |group| {
        group.all_reduce(&room(1001, Kind::Float), ReduceOp::Sum, PURPOSE)
    })
}

fn leave_native(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu(ENDED_BY_WATCHDOG) {
        return Ok(());
    }
    leave(rank, |group| {
        group.all_reduce(&room(1001, Kind::Float), ReduceOp::Max, PURPOSE)
    })
}

fn leave_message(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu(ENDED_BY_WATCHDOG) {
        return Ok(());
    }
    leave(rank, |group| {
        group.recv(&room(1001, Kind::Float), 1, 0, PURPOSE)
    })
}

fn leave_barrier(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu(ENDED_BY_WATCHDOG) {
        return Ok(());
    }
    leave(rank, Group::barrier)
}

fn after_abort(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu(ENDED_BY_WATCHDOG) {
        return Ok(());
    }
    let group = world_of(rank, LONG)?;
    group.barrier()?.wait()?;
    rank.barrier()?;
    group.abort();
    let came = Instant::now();
    for _ in 0..3 {
        let tensor = whole(rank.index(), 64, Kind::Float);
        let error = failure(
            group
                .all_reduce(&tensor, ReduceOp::Sum, PURPOSE)
                .and_then(Work::wait),
        );
        assert_eq!(error.cause, Cause::Aborted, "{error}");
    }
    assert!(
        came.elapsed() < AT_ONCE,
        "rejected after {:?}",
        came.elapsed()
    );
    rank.barrier()?;
    Ok(())
}

const SHORT: Duration = Duration::from_secs(2);

/// Rank 0 waits for a peer that never enters.
fn wait_in_vain(rank: &Rank, group: Group, start: impl Fn(&Group) -> Result<Work>) -> Outcome {
    group.barrier()?.wait()?;
    if rank.index() == 0 {
        let came = Instant::now();
        let error = failure(start(&group).and_then(Work::wait));
        let took = came.elapsed();
        assert!(matches!(error.cause, Cause::Timeout(_)), "{error}");
        assert!(
            took >= SHORT / 2 && took < 2 * SHORT,
            "gave up after {took:?}"
        );
    }
    rank.barrier()?;
    Ok(())
}

fn timeout(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu(ENDED_BY_WATCHDOG) {
        return Ok(());
    }
    wait_in_vain(rank, world_of(rank, SHORT)?, all_reduce)
}

fn all_reduce(group: &Group) -> Result<Work> {
    group.all_reduce(&room(1001, Kind::Float), ReduceOp::Sum, PURPOSE)
}

/// In a group created before the timeout changed, and in one created later.
fn changed_timeout(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu(ENDED_BY_WATCHDOG) {
        return Ok(());
    }
    let world = joined(rank, LONG)?;
    world.world_group()?.barrier()?.wait()?;
    world.set_timeout(SHORT)?;
    wait_in_vain(rank, world.world_group()?, all_reduce)?;
    let (later, _) = world.subgroups(Axis::DpReplicate, rank.size())?;
    wait_in_vain(rank, later, |group| {
        group.recv(&room(1001, Kind::Float), 1, 0, PURPOSE)
    })
}

fn message_timeout(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu(ENDED_BY_WATCHDOG) {
        return Ok(());
    }
    wait_in_vain(rank, world_of(rank, SHORT)?, |group| {
        group.recv(&room(1001, Kind::Float), 1, 0, PURPOSE)
    })
}

/// A rank drops its world, as a failing rank does; the others must not wait for the timeout.
fn lost_peer(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu(ENDED_BY_WATCHDOG) {
        return Ok(());
    }
    let group = world_of(rank, LONG)?;
    group.barrier()?.wait()?;
    if rank.index() + 1 == rank.size() {
        group.abort();
    } else {
        let came = Instant::now();
        let tensor = whole(rank.index(), 1001, Kind::Float);
        let error = failure(
            group
                .all_reduce(&tensor, ReduceOp::Sum, PURPOSE)
                .and_then(Work::wait),
        );
        assert!(matches!(error.cause, Cause::PeerLost { .. }), "{error}");
        assert!(
            came.elapsed() < AT_ONCE,
            "noticed after {:?}",
            came.elapsed()
        );
    }
    rank.barrier()?;
    Ok(())
}

/// Its memory must stay valid, and it must not interfere with the next collective.
fn forgotten_work(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for _ in 0..5 {
        let tensor = whole(rank.index(), 100_001, Kind::Float);
        drop(group.all_reduce(&tensor, ReduceOp::Sum, PURPOSE)?);
        drop(tensor);
    }
    still_works(rank, &group)
}
