//! How a collective is carried out: by the backend, by messages of our own, or not at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cxx::{SharedPtr, UniquePtr};
use tch::Tensor;
use trainyard_trace::{Collective, CollectiveKind, MemoryKind, Purpose, sent_bytes};

use super::{Call, Engine, Group, ReduceOp, bytes, clones, element};
use crate::bridge::ffi;
use crate::compose::{self, Peers};
use crate::error::{Cause, CommunicationError, Result};
use crate::lane::Task;
use crate::work::{State, Work};
use crate::{memory, meta};

impl Group {
    /// In a dry run: keeps the room that summing shards of `length` elements takes.
    pub(super) fn reserve(&self, like: &Tensor, length: i64) -> Result<()> {
        let Engine::Fake(rooms) = &self.0.engine else {
            return Ok(());
        };
        let needed = compose::room_for(length, self.size());
        let mut rooms = rooms.lock().unwrap_or_else(|p| p.into_inner());
        let room = rooms.get(&(like.kind() as i32));
        if room.is_none_or(|room| (room.numel() as i64) < needed) {
            let room = memory::scope(MemoryKind::Communication, || {
                meta::new_zeros(&like.f_detach()?, &[needed])
            })?;
            rooms.insert(like.kind() as i32, room);
        }
        Ok(())
    }

    pub(super) fn native(
        &self,
        call: Call,
        start: impl FnOnce(&ffi::GroupHandle) -> Result<UniquePtr<ffi::WorkHandle>, cxx::Exception>
        + Send
        + 'static,
    ) -> Result<Work> {
        self.check_contiguous(&call)?;
        match &self.0.engine {
            Engine::Alone => Ok(Work::nothing()),
            Engine::Fake(_) => Ok(self.work(State::Done, call)),
            Engine::Gloo(gloo) => {
                let handle = Shared(gloo.handle.clone());
                let sockets = Arc::clone(&gloo.sockets);
                let task: Task = Box::new(move || {
                    let handle = handle;
                    let work = start(&handle.0).map_err(|e| e.what().to_owned())?;
                    compose::wait_all(vec![work], || sockets.shut())
                });
                Ok(self.work(State::Lane(gloo.lane.run(task)), call))
            }
            // On the caller's thread: NCCL queues on its current stream.
            Engine::Nccl(handle) => {
                let work = start(handle).map_err(|e| self.failure(&call, e.what()))?;
                let kept = clones(&call.operands);
                Ok(self.work(State::Posted(vec![work], kept), call))
            }
        }
    }

    pub(super) fn compose(
        &self,
        call: Call,
        run: impl FnOnce(&Peers) -> Result<(), String> + Send + 'static,
    ) -> Result<Work> {
        self.check_contiguous(&call)?;
        let Engine::Gloo(gloo) = &self.0.engine else {
            let state = State::Done;
            return Ok(match self.size() {
                1 => Work::nothing(),
                _ => self.work(state, call),
            });
        };
        let peers = Peers {
            upward: gloo.handle.clone(),
            downward: gloo.downward.clone(),
            index: self.index(),
            size: self.size(),
            sequence: self.0.sequence.load(Ordering::Relaxed),
            sockets: Arc::clone(&gloo.sockets),
        };
        let task: Task = Box::new(move || {
            let outcome = run(&peers);
            if outcome.is_err() {
                peers.leave();
            }
            outcome
        });
        Ok(self.work(State::Lane(gloo.lane.run(task)), call))
    }

    /// Composed collectives are for Gloo (counted alike by a fake group), sums, and groups small
    /// enough that everybody may talk to everybody.
    pub(super) fn composes(&self, op: ReduceOp) -> bool {
        const MOST_DIRECT_PEERS: usize = 16;
        matches!(self.0.engine, Engine::Gloo(_) | Engine::Fake(_))
            && matches!(op, ReduceOp::Sum | ReduceOp::Mean)
            && (2..=MOST_DIRECT_PEERS).contains(&self.size())
    }

    pub(super) fn scale(&self, op: ReduceOp) -> Option<f64> {
        (op == ReduceOp::Mean).then(|| 1.0 / self.size() as f64)
    }

    pub(super) fn call(
        &self,
        kind: CollectiveKind,
        purpose: Purpose,
        operands: &[&Tensor],
        payload_bytes: u64,
        sent_bytes: u64,
    ) -> Call {
        let operands = operands.iter().map(|t| t.shallow_clone()).collect();
        Call {
            kind,
            purpose,
            operands,
            payload_bytes,
            sent_bytes,
            issued_ns: self.0.ledger.now_ns(),
        }
    }

    pub(super) fn rooted(
        &self,
        kind: CollectiveKind,
        purpose: Purpose,
        operands: &[&Tensor],
        root: usize,
    ) -> Result<Call> {
        let operand: u64 = operands.iter().map(|t| bytes(t)).sum();
        let payload = match kind {
            // The operand is one rank's part of what the root hands out.
            CollectiveKind::Scatter => operand * self.size() as u64,
            _ => operand,
        };
        // Gloo's trees: what leaves the root, or goes to it, is counted where it is sent from.
        let is_root = root == self.index();
        let sent = match kind {
            // A ring in which the root takes part, and then everybody's share to the root.
            CollectiveKind::Reduce if is_root => {
                sent_bytes(CollectiveKind::ReduceScatter, self.size(), payload)
            }
            _ if kind.sends(is_root) => sent_bytes(kind, self.size(), payload),
            _ => 0,
        };
        let call = self.call(kind, purpose, operands, payload, sent);
        self.check(
            &call,
            root < self.size(),
            "the root must be an index of the group",
        )?;
        Ok(call)
    }

    pub(super) fn expected_at(&self, root: usize) -> usize {
        if root == self.index() { self.size() } else { 0 }
    }

    pub(super) fn check(&self, call: &Call, good: bool, rule: &str) -> Result<()> {
        match good {
            true => Ok(()),
            false => Err(Box::new(self.about(call, Cause::Operands(rule.to_owned()))).into()),
        }
    }

    /// Bytes of one type must not be read as another: the backend ends the process over it.
    pub(super) fn check_kinds(&self, call: &Call, more: &[Tensor]) -> Result<()> {
        let mut kinds = call.operands.iter().chain(more).map(Tensor::kind);
        let first = kinds.next();
        let good = kinds.all(|kind| Some(kind) == first);
        self.check(call, good, "tensors must have one type: convert them first")
    }

    /// For lists beside the one operand.
    pub(super) fn check_alike(&self, call: &Call, list: &[Tensor]) -> Result<()> {
        let size = call.operands.first().map(Tensor::size);
        let good = list
            .iter()
            .all(|t| Some(t.size()) == size && t.is_contiguous());
        self.check(
            call,
            good,
            "tensors of the list must be contiguous and shaped like the single one",
        )
    }

    pub(super) fn check_mean(&self, call: &Call, op: ReduceOp) -> Result<()> {
        let good = op != ReduceOp::Mean || call.operands.iter().all(|t| t.is_floating_point());
        self.check(call, good, "a mean needs floating-point elements: use Sum")
    }

    pub(super) fn check_contiguous(&self, call: &Call) -> Result<()> {
        let good = call.operands.iter().all(|t| t.is_contiguous());
        self.check(
            call,
            good,
            "tensors must be contiguous: call .contiguous() first",
        )
    }

    pub(super) fn failure(&self, call: &Call, message: &str) -> crate::TorchError {
        let cause = Cause::from_message(message, self.0.aborted.load(Ordering::Acquire));
        Box::new(self.about(call, cause)).into()
    }

    pub(super) fn about(&self, call: &Call, cause: Cause) -> CommunicationError {
        CommunicationError {
            rank: self.0.place.rank,
            kind: call.kind,
            group: self.0.place.name.clone(),
            group_size: self.size(),
            sequence: self.counter(call.kind).load(Ordering::Relaxed),
            operands: call
                .operands
                .iter()
                .map(|t| format!("{:?}{:?}", t.kind(), t.size()))
                .collect::<Vec<_>>()
                .join(", "),
            cause,
        }
    }

    pub(super) fn counter(&self, kind: CollectiveKind) -> &AtomicU64 {
        match kind {
            CollectiveKind::Send | CollectiveKind::Recv => &self.0.num_messages,
            _ => &self.0.sequence,
        }
    }

    pub(super) fn work(&self, state: State, call: Call) -> Work {
        let about = self.about(&call, Cause::Aborted);
        let record = Collective {
            kind: call.kind,
            group: self.0.place.name.clone(),
            group_size: self.size(),
            sequence: self.counter(call.kind).fetch_add(1, Ordering::Relaxed),
            purpose: call.purpose,
            element: call
                .operands
                .first()
                .map_or("none", |t| element(t.kind()))
                .to_owned(),
            payload_bytes: call.payload_bytes,
            sent_bytes: call.sent_bytes,
            issued_ns: call.issued_ns,
            started_ns: 0,
            ended_ns: 0,
            waited: None,
        };
        Work::new(state, &self.0.ledger, record, about, &self.0.aborted)
    }
}

/// A handle on its way to the lane.
struct Shared(SharedPtr<ffi::GroupHandle>);
// SAFETY: the group is thread safe (see bridge.rs); a SharedPtr's count is atomic.
unsafe impl Send for Shared {}
