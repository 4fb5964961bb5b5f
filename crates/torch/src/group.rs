//! A set of ranks with collectives.
//!
//! Every collective is asynchronous, returns a [`Work`], and is written in the ledger with its
//! purpose and its bytes. There is no other way to communicate, so nothing escapes the ledger.

mod carry;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cxx::SharedPtr;
use tch::{Kind, Tensor};
use trainyard_trace::{CollectiveKind, Ledger, Purpose, all_to_all_sent_bytes, sent_bytes};

use crate::border::{addresses, borrow};
use crate::bridge::ffi;
use crate::compose;
use crate::error::Result;
use crate::lane::Lane;
use crate::sockets::{Sockets, WireBytes};
use crate::store::millis;
use crate::work::{State, Work};

/// How values of different ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their sum over the number of ranks.
    Mean,
    /// Their product.
    Product,
    /// The smallest.
    Min,
    /// The largest.
    Max,
}

/// One message of a batch; peers are indices in the group.
pub enum Message<'a> {
    /// To a peer.
    Send(&'a Tensor, usize),
    /// From a peer.
    Recv(&'a Tensor, usize),
}

/// A set of ranks that communicate. Cheap to clone; may be used from several threads, as long as all
/// ranks ask for its collectives in the same order.
#[derive(Clone)]
pub struct Group(Arc<Inner>);

struct Inner {
    place: Place,
    ledger: Ledger,
    /// Collectives so far: the same on every rank.
    sequence: AtomicU64,
    /// Messages so far, apart: they are between some ranks only.
    num_messages: AtomicU64,
    aborted: Arc<AtomicBool>,
    engine: Engine,
}

/// Where this rank stands in the group.
#[derive(Debug, Clone)]
pub struct Place {
    /// The group's name: the axes it runs along.
    pub name: String,
    /// Global rank of this process.
    pub rank: usize,
    /// This rank's index in the group.
    pub index: usize,
    /// Number of ranks in the group.
    pub size: usize,
}

/// What carries the collectives out.
pub(crate) enum Engine {
    /// A group of one.
    Alone,
    /// A group of any size in which only this rank exists: everything is counted, nothing is sent. The
    /// room that a real one would keep for what comes in is kept too, one per type.
    Fake(Mutex<HashMap<i32, Tensor>>),
    Gloo(Gloo),
    Nccl(SharedPtr<ffi::GroupHandle>),
}

pub(crate) struct Gloo {
    pub handle: SharedPtr<ffi::GroupHandle>,
    /// A second set of connections, for messages to lower ranks: see `compose.rs`.
    pub downward: SharedPtr<ffi::GroupHandle>,
    pub lane: Lane,
    pub sockets: Arc<Sockets>,
}

// SAFETY: process groups are thread safe (see bridge.rs); a SharedPtr's count is atomic.
unsafe impl Send for Engine {}
// SAFETY: as above.
unsafe impl Sync for Engine {}

/// One collective as it is asked for.
struct Call {
    kind: CollectiveKind,
    purpose: Purpose,
    operands: Vec<Tensor>,
    payload_bytes: u64,
    sent_bytes: u64,
    /// Before it is queued, for it may begin at once.
    issued_ns: u64,
}

impl Group {
    pub(crate) fn new(place: Place, ledger: Ledger, engine: Engine) -> Group {
        Group(Arc::new(Inner {
            place,
            ledger,
            sequence: AtomicU64::new(0),
            num_messages: AtomicU64::new(0),
            aborted: Arc::new(AtomicBool::new(false)),
            engine,
        }))
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) -> Result<()> {
        let handles = match &self.0.engine {
            Engine::Alone | Engine::Fake(_) => vec![],
            Engine::Gloo(gloo) => vec![&gloo.handle, &gloo.downward],
            Engine::Nccl(handle) => vec![handle],
        };
        for handle in handles {
            ffi::set_timeout(handle, millis(timeout))?;
        }
        Ok(())
    }

    /// A group of one rank, whose collectives do nothing.
    pub fn alone(ledger: &Ledger) -> Group {
        let place = Place {
            name: "alone".to_owned(),
            rank: ledger.rank(),
            index: 0,
            size: 1,
        };
        Group::new(place, ledger.clone(), Engine::Alone)
    }

    /// This rank's index in the group.
    pub fn index(&self) -> usize {
        self.0.place.index
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.0.place.size
    }

    /// The group's name: the axes it runs along.
    pub fn name(&self) -> &str {
        &self.0.place.name
    }

    /// Whether nothing is ever sent: a dry run.
    pub fn is_fake(&self) -> bool {
        matches!(self.0.engine, Engine::Fake(_))
    }

    /// The ledger its collectives are written in.
    pub fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    /// Makes whoever waits in a collective of this group leave at once with [`Cause::Aborted`](crate::Cause::Aborted), here
    /// and (seeing a lost peer) on the other ranks. The group is of no use afterwards.
    pub fn abort(&self) {
        self.0.aborted.store(true, Ordering::Release);
        if let Engine::Gloo(gloo) = &self.0.engine {
            gloo.sockets.shut();
        }
    }

    /// What the kernel counted on the group's connections (Gloo), headers of Gloo included.
    pub fn wire_bytes(&self) -> WireBytes {
        match &self.0.engine {
            Engine::Gloo(gloo) => gloo.sockets.wire_bytes(),
            _ => WireBytes::default(),
        }
    }

    /// Every rank's `tensor` becomes the reduction over all of them.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp, purpose: Purpose) -> Result<Work> {
        let elements = tensor.numel() as i64;
        let composed = self.composes(op) && elements >= self.size() as i64;
        let sent = match composed {
            true => compose::all_reduce_sends(elements, self.index(), self.size()) * width(tensor),
            false => sent_bytes(CollectiveKind::AllReduce, self.size(), bytes(tensor)),
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
        if composed {
            let longest = compose::shard(elements, 0, self.size());
            self.reserve(tensor, longest.end - longest.start)?;
            let (tensor, scale) = (tensor.shallow_clone(), self.scale(op));
            return self.compose(call, move |peers| peers.all_reduce(&tensor, scale));
        }
        let tensor = tensor.shallow_clone();
        self.native(call, move |group| {
            ffi::all_reduce(group, borrow(&tensor), code(op))
        })
    }

    /// `out` becomes the `input`s of all ranks, one after the other.
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
        match self.composes(ReduceOp::Sum) {
            true => self.compose(call, move |peers| peers.all_gather(&out, &input)),
            false => self.native(call, move |group| {
                ffi::all_gather(group, borrow(&out), borrow(&input))
            }),
        }
    }

    /// `out` becomes this rank's part of the reduction of all ranks' `input`s.
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
        if self.composes(op) {
            self.reserve(out, out.numel() as i64)?;
        }
        let (out, input, scale) = (out.shallow_clone(), input.shallow_clone(), self.scale(op));
        match self.composes(op) {
            true => self.compose(call, move |peers| peers.reduce_scatter(&out, &input, scale)),
            false => self.native(call, move |group| {
                ffi::reduce_scatter(group, borrow(&out), borrow(&input), code(op))
            }),
        }
    }

    /// Rows `in_splits[p]` of `input` go to rank `p`; `out_splits[p]` rows come from it. Splits are
    /// counted along the first dim; empty ones are allowed.
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
            "splits must be one per rank and add up to the first dim",
        )?;
        self.check_kinds(&call, &[])?;
        if self.size() == 1 {
            copy(out, input)?;
        }
        let (out, input) = (out.shallow_clone(), input.shallow_clone());
        let (out_splits, in_splits) = (out_splits.to_vec(), in_splits.to_vec());
        self.native(call, move |group| {
            ffi::all_to_all(group, borrow(&out), borrow(&input), &out_splits, &in_splits)
        })
    }

    /// Every rank's `tensor` becomes that of the rank with index `root`.
    pub fn broadcast(&self, tensor: &Tensor, root: usize, purpose: Purpose) -> Result<Work> {
        let call = self.rooted(CollectiveKind::Broadcast, purpose, &[tensor], root)?;
        let tensor = tensor.shallow_clone();
        self.native(call, move |group| {
            ffi::broadcast(group, borrow(&tensor), root as i32)
        })
    }

    /// `root`'s `tensor` becomes the reduction; the others' are left undefined.
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
        self.native(call, move |group| {
            ffi::reduce(group, borrow(&tensor), root as i32, code(op))
        })
    }

    /// `root` receives every rank's `input` in `outs`, one tensor per rank; elsewhere `outs` is empty.
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
            outs.len() == self.expected_at(root),
            "outputs: one per rank at the root, none elsewhere",
        )?;
        self.check_kinds(&call, outs)?;
        self.check_alike(&call, outs)?;
        if let ([out], 1) = (outs, self.size()) {
            copy(out, input)?;
        }
        let (outs, input) = (clones(outs), input.shallow_clone());
        self.native(call, move |group| {
            ffi::gather(group, &addresses(&outs), borrow(&input), root as i32)
        })
    }

    /// Every rank receives in `out` its own of `root`'s `inputs`; elsewhere `inputs` is empty.
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
            inputs.len() == self.expected_at(root),
            "inputs: one per rank at the root, none elsewhere",
        )?;
        self.check_kinds(&call, inputs)?;
        self.check_alike(&call, inputs)?;
        if let ([input], 1) = (inputs, self.size()) {
            copy(out, input)?;
        }
        let (out, inputs) = (out.shallow_clone(), clones(inputs));
        self.native(call, move |group| {
            ffi::scatter(group, borrow(&out), &addresses(&inputs), root as i32)
        })
    }

    /// Returns when every rank has come here.
    pub fn barrier(&self) -> Result<Work> {
        let call = self.call(CollectiveKind::Barrier, Purpose::Control, &[], 0, 0);
        self.native(call, ffi::barrier)
    }

    /// Sends `tensor` to the peer with that index.
    pub fn send(&self, tensor: &Tensor, peer: usize, tag: u16, purpose: Purpose) -> Result<Work> {
        self.batch(&[Message::Send(tensor, peer)], tag, purpose)
    }

    /// Receives into `tensor` from the peer with that index.
    pub fn recv(&self, tensor: &Tensor, peer: usize, tag: u16, purpose: Purpose) -> Result<Work> {
        self.batch(&[Message::Recv(tensor, peer)], tag, purpose)
    }

    /// Posts several messages at once, so that two ranks that send to each other cannot block.
    /// Messages between two ranks with one tag arrive in the order they were sent.
    pub fn batch(&self, messages: &[Message<'_>], tag: u16, purpose: Purpose) -> Result<Work> {
        let sent: u64 = messages
            .iter()
            .map(|m| {
                if let Message::Send(t, _) = m {
                    bytes(t)
                } else {
                    0
                }
            })
            .sum();
        let payload: u64 = messages.iter().map(|m| bytes(m.tensor())).sum();
        let kind = match messages.iter().any(|m| matches!(m, Message::Send(..))) {
            true => CollectiveKind::Send,
            false => CollectiveKind::Recv,
        };
        let tensors: Vec<&Tensor> = messages.iter().map(Message::tensor).collect();
        let call = self.call(kind, purpose, &tensors, payload, sent);
        let reachable = messages
            .iter()
            .all(|m| m.peer() < self.size() && m.peer() != self.index());
        self.check(
            &call,
            reachable,
            "a peer must be another index of the group",
        )?;
        let handle = match &self.0.engine {
            Engine::Alone | Engine::Fake(_) => return Ok(self.work(State::Done, call)),
            Engine::Gloo(gloo) => &gloo.handle,
            Engine::Nccl(handle) => handle,
        };
        let mut posted = Vec::with_capacity(messages.len());
        for message in messages {
            let (tensor, peer) = (borrow(message.tensor()), message.peer() as i32);
            let result = match message {
                Message::Send(..) => ffi::send(handle, tensor, peer, i32::from(tag)),
                Message::Recv(..) => ffi::recv(handle, tensor, peer, i32::from(tag)),
            };
            posted.push(result.map_err(|e| self.failure(&call, e.what()))?);
        }
        let kept = clones(&call.operands);
        Ok(self.work(State::Posted(posted, kept), call))
    }
}

impl Message<'_> {
    fn tensor(&self) -> &Tensor {
        match self {
            Message::Send(tensor, _) | Message::Recv(tensor, _) => tensor,
        }
    }

    fn peer(&self) -> usize {
        match self {
            Message::Send(_, peer) | Message::Recv(_, peer) => *peer,
        }
    }
}

/// c10d's number of a reduction.
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

/// Type names as PyTorch prints them.
fn element(kind: Kind) -> &'static str {
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
