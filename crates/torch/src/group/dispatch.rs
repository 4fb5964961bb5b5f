//! Dispatches a collective: to the backend, to a direct collective, or, in a dry run, to nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cxx::{SharedPtr, UniquePtr};
use tch::Tensor;
use trainyard_trace::{Collective, CollectiveKind, MemoryKind, Purpose, sent_bytes};

use super::{BackendGroup, Call, Gloo, Group, Nccl, ReduceOp, bytes, clones, dtype_name};
use crate::bridge::ffi;
use crate::comm_thread::Task;
use crate::direct_collectives::{self, DirectGroup};
use crate::error::{Cause, CommunicationError, Result};
use crate::work::{State, Work};
use crate::{interleave, memory, meta};

impl Group {
    /// In a dry run, allocates the receive buffer that reducing shards of `length` elements needs.
    pub(super) fn reserve(&self, like: &Tensor, length: i64) -> Result<()> {
        let BackendGroup::Fake(buffers) = &self.inner.backend_group else {
            return Ok(());
        };
        if is_for_nccl(like) {
            return Ok(());
        }
        let needed = direct_collectives::scratch_elements(length, self.size());
        let mut buffers = buffers.lock().unwrap_or_else(|p| p.into_inner());
        let buffer = buffers.get(&(like.kind() as i32));
        if buffer.is_none_or(|buffer| (buffer.numel() as i64) < needed) {
            let buffer = memory::scope(MemoryKind::Communication, || {
                meta::new_zeros(&like.f_detach()?, &[needed])
            })?;
            buffers.insert(like.kind() as i32, buffer);
        }
        Ok(())
    }

    /// Where a collective goes: tensors on the host never go through NCCL. A barrier, which has no tensor, blocks the
    /// host, and so belongs there too.
    pub(super) fn route(&self, operand: Option<&Tensor>) -> Route<'_> {
        match &self.inner.backend_group {
            BackendGroup::SingleRank | BackendGroup::Fake(_) => Route::Nowhere,
            BackendGroup::Gloo(gloo) => Route::Gloo(gloo),
            BackendGroup::Nccl(nccl) => match operand {
                Some(tensor) if is_for_nccl(tensor) => Route::Nccl(nccl),
                _ => Route::Gloo(&nccl.host),
            },
        }
    }

    /// Runs a collective of the backend.
    pub(super) fn run_native(
        &self,
        call: Call,
        start: impl FnOnce(&ffi::GroupHandle) -> Result<UniquePtr<ffi::WorkHandle>, cxx::Exception>
        + Send
        + 'static,
    ) -> Result<Work> {
        self.check_contiguous(&call)?;
        self.check_devices(&call)?;
        match self.route(call.operands.first()) {
            Route::Nowhere => Ok(self.work_without_peers(call)),
            Route::Gloo(gloo) => {
                let handle = Shared(gloo.handle.clone());
                let sockets = Arc::clone(&gloo.sockets);
                let task: Task = Box::new(move || {
                    let handle = handle;
                    let work = start(&handle.0).map_err(|e| e.what().to_owned())?;
                    direct_collectives::wait_all(vec![work], || sockets.shutdown())
                });
                Ok(self.work(State::Queued(gloo.comm_thread.run(task)), call))
            }
            // On the caller's thread, because NCCL queues on the caller's current stream.
            Route::Nccl(nccl) => {
                let work = start(&nccl.handle).map_err(|e| self.failure(&call, e.what()))?;
                let operands = clones(&call.operands);
                Ok(self.work(State::Posted(vec![work], operands), call))
            }
        }
    }

    /// Runs a direct collective on the group's communication thread.
    pub(super) fn run_direct(
        &self,
        call: Call,
        run: impl FnOnce(&DirectGroup) -> Result<(), String> + Send + 'static,
    ) -> Result<Work> {
        self.check_contiguous(&call)?;
        self.check_devices(&call)?;
        let Route::Gloo(gloo) = self.route(call.operands.first()) else {
            return Ok(self.work_without_peers(call));
        };
        let peers = DirectGroup {
            upward: gloo.handle.clone(),
            downward: gloo.downward.clone(),
            index: self.index(),
            size: self.size(),
            sequence: self.inner.sequence.load(Ordering::Relaxed),
            sockets: Arc::clone(&gloo.sockets),
            shared_memory: gloo.shared_memory.clone(),
        };
        let task: Task = Box::new(move || {
            let outcome = run(&peers);
            if outcome.is_err() {
                peers.disconnect();
            }
            outcome
        });
        // While two passes take turns, one computes during the other's collective.
        let completion = if self.runs_on_caller && !interleave::is_active() {
            gloo.comm_thread.run_when_waited_for(task)
        } else {
            gloo.comm_thread.run(task)
        };
        Ok(self.work(State::Queued(completion), call))
    }

    /// The work of a collective that goes nowhere. In a dry run it counts as communication; in a group of one rank
    /// there is none.
    fn work_without_peers(&self, call: Call) -> Work {
        match self.size() {
            1 => Work::completed(),
            _ => self.work(State::Done, call),
        }
    }

    /// Whether a collective with this reduction is direct: with Gloo (or a dry run of it, which must count the same),
    /// for sums, and in groups small enough for all-to-all connections.
    pub(super) fn uses_direct(&self, op: ReduceOp, operand: &Tensor) -> bool {
        const MAX_DIRECT_PEERS: usize = 16;
        !is_for_nccl(operand)
            && matches!(op, ReduceOp::Sum | ReduceOp::Mean)
            && (2..=MAX_DIRECT_PEERS).contains(&self.size())
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
            issued_ns: self.inner.ledger.now_ns(),
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
            // The operand is one rank's entry of the root's inputs.
            CollectiveKind::Scatter => operand * self.size() as u64,
            _ => operand,
        };
        // In Gloo's trees, bytes from and to the root count on the rank that sends them.
        let is_root = root == self.index();
        let sent = match kind {
            // A ring reduce-scatter in which the root takes part, then every rank's shard goes to the root.
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
            "the root must be the index of a rank of the group",
        )?;
        Ok(call)
    }

    pub(super) fn expected_len(&self, root: usize) -> usize {
        if root == self.index() { self.size() } else { 0 }
    }

    pub(super) fn check(&self, call: &Call, good: bool, rule: &str) -> Result<()> {
        if good {
            Ok(())
        } else {
            Err(Box::new(self.error(call, Cause::Operands(rule.to_owned()))).into())
        }
    }

    /// All tensors must have one type, because the backend aborts the process otherwise.
    pub(super) fn check_kinds(&self, call: &Call, more: &[Tensor]) -> Result<()> {
        let mut kinds = call.operands.iter().chain(more).map(Tensor::kind);
        let first = kinds.next();
        let good = kinds.all(|kind| Some(kind) == first);
        self.check(
            call,
            good,
            "all tensors must have the same type: convert them first",
        )
    }

    /// Checks that the tensors of a list are contiguous and have the shape of the operand.
    pub(super) fn check_alike(&self, call: &Call, list: &[Tensor]) -> Result<()> {
        let size = call.operands.first().map(Tensor::size);
        let good = list
            .iter()
            .all(|t| Some(t.size()) == size && t.is_contiguous());
        self.check(
            call,
            good,
            "the listed tensors must be contiguous and have the shape of the other operand",
        )
    }

    pub(super) fn check_mean(&self, call: &Call, op: ReduceOp) -> Result<()> {
        let good = op != ReduceOp::Mean || call.operands.iter().all(|t| t.is_floating_point());
        self.check(
            call,
            good,
            "ReduceOp::Mean needs floating-point tensors: use ReduceOp::Sum",
        )
    }

    /// Checks that the tensors of a group on GPUs are all on the device or all on the host.
    pub(super) fn check_devices(&self, call: &Call) -> Result<()> {
        if !matches!(self.inner.backend_group, BackendGroup::Nccl(_)) {
            return Ok(());
        }
        let mut devices = call.operands.iter().map(Tensor::device);
        let first = devices.next();
        let good = devices.all(|device| Some(device) == first);
        self.check(
            call,
            good,
            "all tensors must be on the same device: move them first",
        )
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
        let cause = Cause::from_message(message, self.inner.aborted.load(Ordering::Acquire));
        Box::new(self.error(call, cause)).into()
    }

    pub(super) fn error(&self, call: &Call, cause: Cause) -> CommunicationError {
        CommunicationError {
            rank: self.inner.info.rank,
            kind: call.kind,
            group: self.inner.info.name.clone(),
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
            CollectiveKind::Send | CollectiveKind::Recv => &self.inner.num_p2p,
            _ => &self.inner.sequence,
        }
    }

    pub(super) fn work(&self, state: State, call: Call) -> Work {
        let about = self.error(&call, Cause::Aborted);
        let record = Collective {
            kind: call.kind,
            group: self.inner.info.name.clone(),
            group_size: self.size(),
            sequence: self.counter(call.kind).fetch_add(1, Ordering::Relaxed),
            purpose: call.purpose,
            dtype: call
                .operands
                .first()
                .map_or("none", |t| dtype_name(t.kind()))
                .to_owned(),
            payload_bytes: call.payload_bytes,
            sent_bytes: call.sent_bytes,
            issued_ns: call.issued_ns,
            started_ns: 0,
            ended_ns: 0,
            waited: None,
        };
        let peers = match self.route(call.operands.first()) {
            Route::Gloo(gloo) => Some(&gloo.peers),
            Route::Nccl(nccl) => Some(&nccl.host.peers),
            Route::Nowhere => None,
        };
        Work::new(
            state,
            &self.inner.ledger,
            record,
            about,
            &self.inner.aborted,
            peers,
        )
    }
}

/// Whether NCCL would carry a tensor: it is on a GPU.
fn is_for_nccl(tensor: &Tensor) -> bool {
    !meta::is_meta(tensor) && tensor.device().is_cuda()
}

/// Where a collective goes.
pub(super) enum Route<'a> {
    /// The group has one rank, or this is a dry run.
    Nowhere,
    Gloo(&'a Gloo),
    Nccl(&'a Nccl),
}

/// A handle that moves to the communication thread.
struct Shared(SharedPtr<ffi::GroupHandle>);
// SAFETY: the group is thread safe (see bridge.rs); a SharedPtr's count is atomic.
unsafe impl Send for Shared {}
