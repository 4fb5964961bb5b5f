//! Process groups and their collectives.
//!
//! Every collective is asynchronous, returns a [`Work`], and is recorded in the ledger with its purpose and its
//! bytes. There is no other way to communicate, so the ledger is complete.
//!
//! A group on GPUs has NCCL for tensors on the device and Gloo for tensors on the host, like PyTorch's
//! `cpu:gloo,cuda:nccl`: control messages stay on the host and cost no synchronization with the device.

mod dispatch;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cxx::{SharedPtr, UniquePtr};
use tch::{Device, Kind, Tensor};
use trainyard_trace::{CollectiveKind, Ledger, Purpose, all_to_all_sent_bytes, sent_bytes};

use crate::bridge::ffi;
use crate::comm_thread::CommThread;
use crate::direct_collectives;
use crate::error::Result;
use crate::ffi_tensor::{addresses, borrow};
use crate::peers::Peers;
use crate::shared_memory::SharedMemory;
use crate::sockets::{Sockets, WireBytes};
use crate::store::millis;
use crate::work::{State, Work};
use dispatch::Route;

/// The reduction of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// The sum over ranks.
    Sum,
    /// The mean over ranks.
    Mean,
    /// The product over ranks.
    Product,
    /// The minimum over ranks.
    Min,
    /// The maximum over ranks.
    Max,
}

/// One send or receive of a batch, like PyTorch's `P2POp`; peers are indices in the group.
pub enum P2pOp<'a> {
    /// Sends the tensor to a peer.
    Send(&'a Tensor, usize),
    /// Receives the tensor from a peer.
    Recv(&'a Tensor, usize),
}

/// A process group: a set of ranks that communicate. Cheap to clone. Several threads may use it, as long as all ranks
/// issue its collectives in the same order.
#[derive(Clone)]
pub struct Group {
    inner: Arc<Inner>,
    runs_on_caller: bool,
}

struct Inner {
    info: GroupInfo,
    ledger: Ledger,
    /// The number of collectives so far, the same on every rank.
    sequence: AtomicU64,
    /// The number of send/recv batches so far. Counted separately, because they involve only some ranks.
    num_p2p: AtomicU64,
    aborted: Arc<AtomicBool>,
    backend_group: BackendGroup,
}

/// The name and size of a group, and this rank's position in it.
#[derive(Debug, Clone)]
pub struct GroupInfo {
    /// The group's name: the mesh axes that it spans.
    pub name: String,
    /// Global rank of this process.
    pub rank: usize,
    /// This rank's index in the group.
    pub index: usize,
    /// Number of ranks in the group.
    pub size: usize,
}

/// The backend's process group.
pub(crate) enum BackendGroup {
    /// A group of one rank, whose collectives do nothing.
    SingleRank,
    /// A group of a dry run, in which only this rank exists: collectives are recorded but not sent. Holds the receive
    /// buffers that a real group would allocate, one per type.
    Fake(Mutex<HashMap<i32, Tensor>>),
    Gloo(Gloo),
    Nccl(Nccl),
}

/// The NCCL process groups of one group, and its Gloo process group for tensors on the host.
pub(crate) struct Nccl {
    /// Collectives, batches of messages, and single messages to higher ranks.
    pub handle: SharedPtr<ffi::GroupHandle>,
    /// Single messages to lower ranks. The messages between two ranks share a stream, so that in one group a receive
    /// that was posted early would block a send in the other direction.
    pub downward: SharedPtr<ffi::GroupHandle>,
    pub host: Gloo,
    pub device: Device,
}

/// A Gloo process group and its communication thread.
pub(crate) struct Gloo {
    pub handle: SharedPtr<ffi::GroupHandle>,
    /// A second set of connections, for data to lower ranks: see `direct_collectives.rs`.
    pub downward: SharedPtr<ffi::GroupHandle>,
    pub comm_thread: CommThread,
    pub sockets: Arc<Sockets>,
    pub peers: Peers,
    /// If all ranks are on one node.
    pub shared_memory: Option<Arc<SharedMemory>>,
}

impl Gloo {
    fn wire_bytes(&self) -> WireBytes {
        let shared = self
            .shared_memory
            .as_ref()
            .map(|memory| memory.wire_bytes());
        self.sockets.wire_bytes() + shared.unwrap_or_default()
    }
}

// SAFETY: process groups are thread safe (see bridge.rs); a SharedPtr's count is atomic.
unsafe impl Send for BackendGroup {}
// SAFETY: as above.
unsafe impl Sync for BackendGroup {}

/// One collective as the caller issued it.
struct Call {
    kind: CollectiveKind,
    purpose: Purpose,
    operands: Vec<Tensor>,
    payload_bytes: u64,
    sent_bytes: u64,
    /// The time before it was queued, because it may start at once.
    issued_ns: u64,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GroupInfo {
            name, index, size, ..
        } = &self.inner.info;
        write!(f, "Group({name}: rank {index} of {size})")
    }
}

impl Group {
    pub(crate) fn new(info: GroupInfo, ledger: Ledger, backend_group: BackendGroup) -> Group {
        let inner = Inner {
            info,
            ledger,
            sequence: AtomicU64::new(0),
            num_p2p: AtomicU64::new(0),
            aborted: Arc::new(AtomicBool::new(false)),
            backend_group,
        };
        Group {
            inner: Arc::new(inner),
            runs_on_caller: false,
        }
    }

    /// The same group for a caller that waits for every collective at once: its thread runs them on the host, where it
    /// would wait for the communication thread otherwise.
    #[must_use]
    pub fn on_caller(&self) -> Group {
        Group {
            inner: Arc::clone(&self.inner),
            runs_on_caller: true,
        }
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) -> Result<()> {
        let handles = match &self.inner.backend_group {
            BackendGroup::SingleRank | BackendGroup::Fake(_) => vec![],
            BackendGroup::Gloo(gloo) => vec![&gloo.handle, &gloo.downward],
            BackendGroup::Nccl(nccl) => {
                let Nccl {
                    handle,
                    downward,
                    host,
                    device: _,
                } = nccl;
                vec![handle, downward, &host.handle, &host.downward]
            }
        };
        if let Some(memory) = self.shared_memory() {
            memory.set_timeout(timeout);
        }
        for handle in handles {
            ffi::set_timeout(handle, millis(timeout))?;
        }
        Ok(())
    }

    fn shared_memory(&self) -> Option<&Arc<SharedMemory>> {
        match &self.inner.backend_group {
            BackendGroup::Gloo(gloo) => gloo.shared_memory.as_ref(),
            BackendGroup::Nccl(nccl) => nccl.host.shared_memory.as_ref(),
            BackendGroup::SingleRank | BackendGroup::Fake(_) => None,
        }
    }

    /// A group of one rank, whose collectives do nothing.
    pub fn single_rank(ledger: &Ledger) -> Group {
        let info = GroupInfo {
            name: "single rank".to_owned(),
            rank: ledger.rank(),
            index: 0,
            size: 1,
        };
        Group::new(info, ledger.clone(), BackendGroup::SingleRank)
    }

    /// This rank's index in the group.
    pub fn index(&self) -> usize {
        self.inner.info.index
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.inner.info.size
    }

    /// The group's name: the mesh axes that it spans.
    pub fn name(&self) -> &str {
        &self.inner.info.name
    }

    /// Whether this is a group of a dry run, which sends nothing.
    pub fn is_fake(&self) -> bool {
        matches!(self.inner.backend_group, BackendGroup::Fake(_))
    }

    /// The ledger that records the group's collectives.
    pub fn ledger(&self) -> &Ledger {
        &self.inner.ledger
    }

    /// Aborts the group. A thread of this process that waits in one of its collectives fails at once with
    /// [`Cause::Aborted`](crate::Cause::Aborted); the other ranks see a lost peer. The group is unusable afterwards.
    pub fn abort(&self) {
        self.inner.aborted.store(true, Ordering::Release);
        match &self.inner.backend_group {
            BackendGroup::SingleRank | BackendGroup::Fake(_) => {}
            BackendGroup::Gloo(gloo) => gloo.sockets.shutdown(),
            BackendGroup::Nccl(nccl) => {
                nccl.host.sockets.shutdown();
                for handle in [&nccl.handle, &nccl.downward] {
                    if let Err(error) = ffi::abort_group(handle) {
                        tracing::warn!("cannot abort the group {}: {error}", self.name());
                    }
                }
            }
        }
    }

    /// The bytes that the kernel counted on the group's connections (Gloo only), including Gloo's headers, and those that
    /// ranks of a node have read from each other's memory.
    pub fn wire_bytes(&self) -> WireBytes {
        match &self.inner.backend_group {
            BackendGroup::Gloo(gloo) => gloo.wire_bytes(),
            BackendGroup::Nccl(nccl) => nccl.host.wire_bytes(),
            BackendGroup::SingleRank | BackendGroup::Fake(_) => WireBytes::default(),
        }
    }

    /// All-reduce: every rank's `tensor` becomes the reduction over all ranks.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp, purpose: Purpose) -> Result<Work> {
        let elements = tensor.numel() as i64;
        let is_direct = self.uses_direct(op, tensor) && elements >= self.size() as i64;
        let sent = if is_direct {
            direct_collectives::all_reduce_sends(elements, self.index(), self.size())
                * width(tensor)
        } else {
            sent_bytes(CollectiveKind::AllReduce, self.size(), bytes(tensor))
        };
        let operands = [tensor];
        let call = self.call(
            CollectiveKind::AllReduce,
            purpose,
            &operands,
            bytes(tensor),
            sent,
        );
        self.check_mean(&call, op)?;
        if is_direct {
            let longest = direct_collectives::shard(elements, 0, self.size());
            self.reserve(tensor, longest.end - longest.start)?;
            let (tensor, scale) = (tensor.shallow_clone(), self.scale(op));
            return self.run_direct(call, move |peers| peers.all_reduce(&tensor, scale));
        }
        let tensor = tensor.shallow_clone();
        self.run_native(call, move |group| {
            ffi::all_reduce(group, borrow(&tensor), code(op))
        })
    }

    /// All-gather: `out` becomes the concatenation of all ranks' `input`s.
    pub fn all_gather(&self, out: &Tensor, input: &Tensor, purpose: Purpose) -> Result<Work> {
        let sent = sent_bytes(CollectiveKind::AllGather, self.size(), bytes(input));
        let operands = [out, input];
        let call = self.call(
            CollectiveKind::AllGather,
            purpose,
            &operands,
            bytes(out),
            sent,
        );
        self.check(
            &call,
            out.numel() == input.numel() * self.size(),
            "the output must hold one input per rank",
        )?;
        self.check_kinds(&call, &[])?;
        if self.size() == 1 {
            copy(out, input)?;
        }
        let (out, input) = (out.shallow_clone(), input.shallow_clone());
        if self.uses_direct(ReduceOp::Sum, &input) {
            self.run_direct(call, move |peers| peers.all_gather(&out, &input))
        } else {
            self.run_native(call, move |group| {
                ffi::all_gather(group, borrow(&out), borrow(&input))
            })
        }
    }

    /// Reduce-scatter: `out` becomes this rank's shard of the reduction of all ranks' `input`s.
    pub fn reduce_scatter(
        &self,
        out: &Tensor,
        input: &Tensor,
        op: ReduceOp,
        purpose: Purpose,
    ) -> Result<Work> {
        let sent = sent_bytes(CollectiveKind::ReduceScatter, self.size(), bytes(input));
        let operands = [out, input];
        let call = self.call(
            CollectiveKind::ReduceScatter,
            purpose,
            &operands,
            bytes(input),
            sent,
        );
        self.check(
            &call,
            input.numel() == out.numel() * self.size(),
            "the input must hold one output per rank",
        )?;
        self.check_kinds(&call, &[])?;
        self.check_mean(&call, op)?;
        if self.size() == 1 {
            copy(out, input)?;
        }
        if self.uses_direct(op, out) {
            self.reserve(out, out.numel() as i64)?;
        }
        let (out, input, scale) = (out.shallow_clone(), input.shallow_clone(), self.scale(op));
        if self.uses_direct(op, &out) {
            self.run_direct(call, move |peers| peers.reduce_scatter(&out, &input, scale))
        } else {
            self.run_native(call, move |group| {
                ffi::reduce_scatter(group, borrow(&out), borrow(&input), code(op))
            })
        }
    }

    /// All-to-all: sends `in_splits[p]` rows of `input` to rank `p` and receives `out_splits[p]` rows from it. Splits
    /// count along dim 0 and may be 0.
    pub fn all_to_all(
        &self,
        out: &Tensor,
        input: &Tensor,
        out_splits: &[i64],
        in_splits: &[i64],
        purpose: Purpose,
    ) -> Result<Work> {
        let row = row_bytes(input);
        let splits: Vec<u64> = in_splits.iter().map(|&n| n.max(0) as u64 * row).collect();
        let operands = [out, input];
        let sent = all_to_all_sent_bytes(&splits, self.index());
        let call = self.call(
            CollectiveKind::AllToAll,
            purpose,
            &operands,
            bytes(input),
            sent,
        );
        let fits = |splits: &[i64], tensor: &Tensor| {
            splits.len() == self.size()
                && splits.iter().all(|&n| n >= 0)
                && splits.iter().sum::<i64>() == tensor.size().first().copied().unwrap_or(0)
        };
        let good = fits(out_splits, out) && fits(in_splits, input);
        self.check(
            &call,
            good,
            "there must be one split per rank, and they must add up to the length of dim 0",
        )?;
        self.check_kinds(&call, &[])?;
        if self.size() == 1 {
            copy(out, input)?;
        }
        let (out, input) = (out.shallow_clone(), input.shallow_clone());
        let (out_splits, in_splits) = (out_splits.to_vec(), in_splits.to_vec());
        if self.shared_memory().is_some() && self.uses_direct(ReduceOp::Sum, &input) {
            let bytes = |splits: &[i64]| {
                splits
                    .iter()
                    .map(|&rows| rows as usize * row as usize)
                    .collect::<Vec<_>>()
            };
            let (out_bytes, in_bytes) = (bytes(&out_splits), bytes(&in_splits));
            return self.run_direct(call, move |peers| match peers.on_one_node() {
                Some(group) => group.all_to_all(&out, &input, &out_bytes, &in_bytes),
                None => Err("the ranks of the group share no memory".to_owned()),
            });
        }
        self.run_native(call, move |group| {
            ffi::all_to_all(group, borrow(&out), borrow(&input), &out_splits, &in_splits)
        })
    }

    /// Broadcast: every rank's `tensor` becomes that of the rank with index `root`.
    pub fn broadcast(&self, tensor: &Tensor, root: usize, purpose: Purpose) -> Result<Work> {
        let call = self.rooted(CollectiveKind::Broadcast, purpose, &[tensor], root)?;
        let tensor = tensor.shallow_clone();
        self.run_native(call, move |group| {
            ffi::broadcast(group, borrow(&tensor), root as i32)
        })
    }

    /// Reduce: `root`'s `tensor` becomes the reduction; the other ranks' tensors are undefined afterwards.
    pub fn reduce(
        &self,
        tensor: &Tensor,
        root: usize,
        op: ReduceOp,
        purpose: Purpose,
    ) -> Result<Work> {
        let call = self.rooted(CollectiveKind::Reduce, purpose, &[tensor], root)?;
        self.check_mean(&call, op)?;
        let tensor = tensor.shallow_clone();
        self.run_native(call, move |group| {
            ffi::reduce(group, borrow(&tensor), root as i32, code(op))
        })
    }

    /// Gather: `root` receives every rank's `input` in `outs`, one tensor per rank; on other ranks `outs` is empty.
    pub fn gather(
        &self,
        outs: &[Tensor],
        input: &Tensor,
        root: usize,
        purpose: Purpose,
    ) -> Result<Work> {
        let call = self.rooted(CollectiveKind::Gather, purpose, &[input], root)?;
        self.check(
            &call,
            outs.len() == self.expected_len(root),
            "the root needs one output per rank, and the other ranks none",
        )?;
        self.check_kinds(&call, outs)?;
        self.check_alike(&call, outs)?;
        if let ([out], 1) = (outs, self.size()) {
            copy(out, input)?;
        }
        let (outs, input) = (clones(outs), input.shallow_clone());
        self.run_native(call, move |group| {
            ffi::gather(group, &addresses(&outs), borrow(&input), root as i32)
        })
    }

    /// Scatter: every rank receives its entry of `root`'s `inputs` in `out`; on other ranks `inputs` is empty.
    pub fn scatter(
        &self,
        out: &Tensor,
        inputs: &[Tensor],
        root: usize,
        purpose: Purpose,
    ) -> Result<Work> {
        let call = self.rooted(CollectiveKind::Scatter, purpose, &[out], root)?;
        self.check(
            &call,
            inputs.len() == self.expected_len(root),
            "the root needs one input per rank, and the other ranks none",
        )?;
        self.check_kinds(&call, inputs)?;
        self.check_alike(&call, inputs)?;
        if let ([input], 1) = (inputs, self.size()) {
            copy(out, input)?;
        }
        let (out, inputs) = (out.shallow_clone(), clones(inputs));
        self.run_native(call, move |group| {
            ffi::scatter(group, borrow(&out), &addresses(&inputs), root as i32)
        })
    }

    /// Barrier: the work completes when every rank has called this.
    pub fn barrier(&self) -> Result<Work> {
        let call = self.call(CollectiveKind::Barrier, Purpose::Control, &[], 0, 0);
        self.run_native(call, ffi::barrier)
    }

    /// Sends `tensor` to the peer with this index. Messages from one rank to another arrive in the order in which they
    /// are sent; with Gloo, that holds for messages with the same tag.
    pub fn send(&self, tensor: &Tensor, peer: usize, tag: u16, purpose: Purpose) -> Result<Work> {
        self.send_or_recv(&P2pOp::Send(tensor, peer), tag, purpose)
    }

    /// Receives into `tensor` from the peer with this index.
    pub fn recv(&self, tensor: &Tensor, peer: usize, tag: u16, purpose: Purpose) -> Result<Work> {
        self.send_or_recv(&P2pOp::Recv(tensor, peer), tag, purpose)
    }

    fn send_or_recv(&self, op: &P2pOp<'_>, tag: u16, purpose: Purpose) -> Result<Work> {
        let call = self.messages(std::slice::from_ref(op), purpose)?;
        let handle = match self.route(Some(op.tensor())) {
            Route::Nowhere => return Ok(self.work(State::Done, call)),
            Route::Gloo(gloo) => &gloo.handle,
            Route::Nccl(nccl) => nccl.for_message(op, self.index()),
        };
        let work = op
            .post(handle, tag)
            .map_err(|e| self.failure(&call, e.what()))?;
        Ok(self.work(State::Posted(vec![work], clones(&call.operands)), call))
    }

    /// Connects pairs of ranks, each from sender to receiver, for single messages. NCCL would otherwise connect two
    /// ranks at their first message and block both hosts until then, which deadlocks if a receive is posted before
    /// this rank has sent what the peer waits for. This is a collective call with the same pairs on every rank.
    pub fn connect_pairs(&self, pairs: &[(usize, usize)]) -> Result<()> {
        let BackendGroup::Nccl(nccl) = &self.inner.backend_group else {
            return Ok(());
        };
        let probe = Tensor::f_zeros([1], (Kind::Float, nccl.device))?;
        for &(from, to) in pairs {
            let op = match self.index() {
                index if index == from => P2pOp::Send(&probe, to),
                index if index == to => P2pOp::Recv(&probe, from),
                _ => continue,
            };
            let call = self.messages(std::slice::from_ref(&op), Purpose::Control)?;
            let work = op.post(nccl.for_message(&op, self.index()), 0);
            let work = work.map_err(|e| self.failure(&call, e.what()))?;
            direct_collectives::wait_all(vec![work], || {})
                .map_err(|message| self.failure(&call, &message))?;
        }
        Ok(())
    }

    /// Posts several sends and receives at once, like PyTorch's `batch_isend_irecv`, so that ranks that send to each
    /// other do not deadlock. The peer must match each of them with one of a batch too.
    pub fn batch_send_recv(&self, ops: &[P2pOp<'_>], tag: u16, purpose: Purpose) -> Result<Work> {
        let call = self.messages(ops, purpose)?;
        let posted = match self.route(call.operands.first()) {
            Route::Nowhere => return Ok(self.work(State::Done, call)),
            Route::Gloo(gloo) => ops.iter().map(|op| op.post(&gloo.handle, tag)).collect(),
            Route::Nccl(nccl) => post_coalesced(&nccl.handle, ops),
        };
        let posted: Vec<_> = posted.map_err(|e: cxx::Exception| self.failure(&call, e.what()))?;
        Ok(self.work(State::Posted(posted, clones(&call.operands)), call))
    }

    /// The call of sends and receives, which are recorded together.
    fn messages(&self, ops: &[P2pOp<'_>], purpose: Purpose) -> Result<Call> {
        let is_send = |op: &&P2pOp<'_>| matches!(op, P2pOp::Send(..));
        let sent: u64 = ops
            .iter()
            .filter(is_send)
            .map(|op| bytes(op.tensor()))
            .sum();
        let payload: u64 = ops.iter().map(|op| bytes(op.tensor())).sum();
        let kind = if ops.iter().any(|op| is_send(&op)) {
            CollectiveKind::Send
        } else {
            CollectiveKind::Recv
        };
        let tensors: Vec<&Tensor> = ops.iter().map(P2pOp::tensor).collect();
        let call = self.call(kind, purpose, &tensors, payload, sent);
        let is_reachable = |op: &P2pOp<'_>| op.peer() < self.size() && op.peer() != self.index();
        self.check(
            &call,
            ops.iter().all(is_reachable),
            "the peer must be the index of another rank of the group",
        )?;
        Ok(call)
    }
}

/// Posts messages as one operation. Only then does NCCL progress all of them, whatever their order.
fn post_coalesced(
    handle: &ffi::GroupHandle,
    ops: &[P2pOp<'_>],
) -> Result<Vec<UniquePtr<ffi::WorkHandle>>, cxx::Exception> {
    ffi::start_coalescing(handle)?;
    let posted: Result<Vec<_>, _> = ops.iter().map(|op| op.post(handle, 0)).collect();
    let work = ffi::end_coalescing(handle)?;
    posted?;
    Ok(vec![work])
}

impl Nccl {
    /// The process group of a single message.
    fn for_message(&self, op: &P2pOp<'_>, index: usize) -> &SharedPtr<ffi::GroupHandle> {
        let (from, to) = match *op {
            P2pOp::Send(_, peer) => (index, peer),
            P2pOp::Recv(_, peer) => (peer, index),
        };
        if to > from {
            &self.handle
        } else {
            &self.downward
        }
    }
}

impl P2pOp<'_> {
    fn tensor(&self) -> &Tensor {
        match self {
            P2pOp::Send(tensor, _) | P2pOp::Recv(tensor, _) => tensor,
        }
    }

    fn peer(&self) -> usize {
        match self {
            P2pOp::Send(_, peer) | P2pOp::Recv(_, peer) => *peer,
        }
    }

    fn post(
        &self,
        handle: &ffi::GroupHandle,
        tag: u16,
    ) -> Result<UniquePtr<ffi::WorkHandle>, cxx::Exception> {
        let (tensor, peer) = (borrow(self.tensor()), self.peer() as i32);
        match self {
            P2pOp::Send(..) => ffi::send(handle, tensor, peer, i32::from(tag)),
            P2pOp::Recv(..) => ffi::recv(handle, tensor, peer, i32::from(tag)),
        }
    }
}

/// The value of `c10d::ReduceOp::RedOpType`.
fn code(op: ReduceOp) -> u8 {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Mean => 1,
        ReduceOp::Product => 2,
        ReduceOp::Min => 3,
        ReduceOp::Max => 4,
    }
}

fn copy(out: &Tensor, input: &Tensor) -> Result<()> {
    if out.numel() > 0 {
        tch::no_grad(|| out.shallow_clone().f_copy_(&input.f_view_as(out)?))?;
    }
    Ok(())
}

fn clones(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::shallow_clone).collect()
}

fn width(tensor: &Tensor) -> u64 {
    tensor.kind().elt_size_in_bytes() as u64
}

fn bytes(tensor: &Tensor) -> u64 {
    tensor.numel() as u64 * width(tensor)
}

fn row_bytes(tensor: &Tensor) -> u64 {
    let inner: i64 = tensor.size().iter().skip(1).product();
    inner as u64 * width(tensor)
}

/// Type names as PyTorch spells them.
fn dtype_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Float => "float32",
        Kind::Double => "float64",
        Kind::BFloat16 => "bfloat16",
        Kind::Half => "float16",
        Kind::Int64 => "int64",
        Kind::Int => "int32",
        Kind::Uint8 => "uint8",
        Kind::Bool => "bool",
        _ => "other",
    }
}
