//! Collectives built from direct sends and receives, used where they are faster than Gloo's.
//!
//! Gloo's reduce-scatter sends as many bytes as an all-reduce, and its all-gather is a ring. Here every rank sends
//! each peer exactly the data that the peer needs, all at once, and sums received data in rank order. The number of
//! bytes is the theoretical minimum, and the result does not depend on timing.
//!
//! Data to higher ranks and data to lower ranks use separate connections. Gloo locks a connection while it writes,
//! and its reading thread spins on that lock: with both directions on one connection, that took a tenth of the CPU
//! time.

use std::cell::RefCell;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use cxx::{SharedPtr, UniquePtr};
use tch::Tensor;
use trainyard_trace::MemoryKind;

use crate::bridge::ffi;
use crate::error::TorchError;
use crate::ffi_tensor::borrow;
use crate::memory;
use crate::shared_memory::{SharedGroup, SharedMemory};
use crate::sockets::Sockets;

/// The elements of the flat tensor that rank `index` of `size` reduces: ceil-sized shards, like `torch.chunk`.
pub(crate) fn shard(num_elements: i64, index: usize, size: usize) -> Range<i64> {
    let size = size as i64;
    let chunk = (num_elements + size - 1) / size;
    let start = (chunk * index as i64).min(num_elements);
    start..(start + chunk).min(num_elements)
}

/// The number of elements that this rank sends in an all-reduce: each peer's shard once, and its own reduced shard to
/// every peer.
pub(crate) fn all_reduce_sends(num_elements: i64, index: usize, size: usize) -> u64 {
    let own = shard(num_elements, index, size);
    let own = own.end - own.start;
    (num_elements - own + (size as i64 - 1) * own) as u64
}

/// Elements of a chunk: 1 MiB in fp32, which fits the cache. Smaller in large groups, so that the receive buffers
/// stay within [`MAX_SCRATCH`].
fn chunk_length(size: usize) -> i64 {
    let peers = (size as i64 - 1).max(1);
    (MAX_SCRATCH / 2 / peers).clamp(MIN_CHUNK, MAX_CHUNK)
}

const MAX_CHUNK: i64 = 1 << 18;
/// Below this, the cost of additional sends exceeds the benefit of the saved memory.
const MIN_CHUNK: i64 = 1 << 12;
/// Elements of the receive buffer: two chunks per peer.
const MAX_SCRATCH: i64 = 1 << 20;

/// Elements of the receive buffer for a reduction over `size` ranks whose shards have up to `length` elements.
pub(crate) fn scratch_elements(length: i64, size: usize) -> i64 {
    2 * (size as i64 - 1) * chunk_length(size).min(length)
}

/// Tags of direct collectives are above the tags that callers of send and recv may use.
const FIRST_TAG: i32 = 1 << 24;
const NUM_TAGS: u64 = 1 << 20;

/// The connections of a group, for one direct collective.
pub(crate) struct DirectGroup {
    pub upward: SharedPtr<ffi::GroupHandle>,
    pub downward: SharedPtr<ffi::GroupHandle>,
    pub index: usize,
    pub size: usize,
    pub sequence: u64,
    pub sockets: Arc<Sockets>,
    /// If all ranks are on one node.
    pub shared_memory: Option<Arc<SharedMemory>>,
}

// SAFETY: the handle is thread safe (see bridge.rs).
unsafe impl Send for DirectGroup {}

type Failure = String;
type Posted = UniquePtr<ffi::WorkHandle>;

impl DirectGroup {
    /// Every rank's `tensor` becomes the sum over ranks, times `scale`.
    pub(crate) fn all_reduce(&self, tensor: &Tensor, scale: Option<f64>) -> Result<(), Failure> {
        if let Some(group) = self.on_one_node() {
            return group.all_reduce(tensor, scale);
        }
        let flat = tensor.f_view(-1).map_err(error_text)?;
        let shard_of = |index| slice(&flat, shard(flat.numel() as i64, index, self.size));
        let shards = (0..self.size)
            .map(shard_of)
            .collect::<Result<Vec<_>, _>>()?;
        let own = &shards[self.index];
        let num_chunks = self.num_chunks(&shards[0]);
        let chunk = |shard: &Tensor, index| chunk(shard, index, chunk_length(self.size));
        let mut pending = Vec::new();
        for peer in self.peers() {
            for index in 0..num_chunks {
                // Post the receive early. A peer sends its result only after it has our data, so this memory has been
                // read by the time it is overwritten.
                pending.extend(self.recv(&chunk(&shards[peer], index)?, peer, 1)?);
            }
        }
        self.reduce_chunks(&shards, own, num_chunks, scale, |index| {
            for peer in self.peers() {
                pending.extend(self.send(&chunk(own, index)?, peer, 1)?);
            }
            Ok(())
        })?;
        self.wait_all(pending)
    }

    /// `out` becomes this rank's shard of the sum of `input` over ranks, times `scale`.
    pub(crate) fn reduce_scatter(
        &self,
        out: &Tensor,
        input: &Tensor,
        scale: Option<f64>,
    ) -> Result<(), Failure> {
        if let Some(group) = self.on_one_node() {
            return group.reduce_scatter(out, input, scale);
        }
        let rows = input.f_view([self.size as i64, -1]).map_err(error_text)?;
        let row = |index: usize| rows.f_get(index as i64).map_err(error_text);
        let shards = (0..self.size).map(row).collect::<Result<Vec<_>, _>>()?;
        let out = out.f_view(-1).map_err(error_text)?;
        self.reduce_chunks(
            &shards,
            &out,
            self.num_chunks(&shards[0]),
            scale,
            |_| Ok(()),
        )
    }

    /// Sends every peer its shard, and sums the received shards and this rank's own into `out`, chunk by chunk: while
    /// one chunk is summed, the next is in flight. Calls `done` for every completed chunk of `out`.
    fn reduce_chunks(
        &self,
        shards: &[Tensor],
        out: &Tensor,
        num_chunks: i64,
        scale: Option<f64>,
        mut done: impl FnMut(i64) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let own = &shards[self.index];
        let chunk = |shard: &Tensor, index| chunk(shard, index, chunk_length(self.size));
        let scratch = Scratch::take(own, shards[0].numel() as i64, self.size)?;
        let start = |index: i64| -> Result<(Vec<Tensor>, Vec<Posted>), Failure> {
            let incoming = scratch.buffers(self.index, index, chunk(own, index)?.numel() as i64)?;
            let mut posted = Vec::new();
            for peer in self.peers() {
                posted.extend(self.recv(&incoming[peer], peer, 0)?);
            }
            for peer in self.peers() {
                posted.extend(self.send(&chunk(&shards[peer], index)?, peer, 0)?);
            }
            Ok((incoming, posted))
        };
        let mut in_flight = Some(start(0)?);
        for index in 0..num_chunks {
            let next = if index + 1 < num_chunks {
                Some(start(index + 1)?)
            } else {
                None
            };
            if let Some((incoming, posted)) = std::mem::replace(&mut in_flight, next) {
                self.wait_all(posted)?;
                let (out, own) = (chunk(out, index)?, chunk(own, index)?);
                self.sum_in_rank_order(&out, &own, incoming, scale)?;
            }
            done(index)?;
        }
        scratch.keep();
        Ok(())
    }

    /// The number of chunks of the longest shard; shorter shards end with empty chunks.
    fn num_chunks(&self, longest: &Tensor) -> i64 {
        let length = longest.numel() as i64;
        let chunk = chunk_length(self.size);
        ((length + chunk - 1) / chunk).max(1)
    }

    /// `out` becomes every rank's `input`, in rank order.
    pub(crate) fn all_gather(&self, out: &Tensor, input: &Tensor) -> Result<(), Failure> {
        if let Some(group) = self.on_one_node() {
            return group.all_gather(out, input);
        }
        let rows = out.f_view([self.size as i64, -1]).map_err(error_text)?;
        let row = |index: usize| rows.f_get(index as i64).map_err(error_text);
        let mut posted = Vec::new();
        for peer in self.peers() {
            posted.extend(self.recv(&row(peer)?, peer, 0)?);
        }
        for peer in self.peers() {
            posted.extend(self.send(input, peer, 0)?);
        }
        // The all-gather is in place if the input is this rank's row of the output.
        let mut own = row(self.index)?;
        if own.data_ptr() != input.data_ptr() {
            own.f_copy_(&input.f_view(-1).map_err(error_text)?)
                .map_err(error_text)?;
        }
        self.wait_all(posted)
    }

    /// The group, if its ranks share memory.
    pub(crate) fn on_one_node(&self) -> Option<SharedGroup> {
        Some(SharedGroup {
            memory: Arc::clone(self.shared_memory.as_ref()?),
            sockets: Arc::clone(&self.sockets),
            sequence: self.sequence,
        })
    }

    /// The peers, starting with the next rank, so that not all ranks send to rank 0 first.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (index, size) = (self.index, self.size);
        (1..size).map(move |step| (index + step) % size)
    }

    /// `out = scale * sum over ranks`, added in rank order regardless of the order of arrival.
    fn sum_in_rank_order(
        &self,
        out: &Tensor,
        own: &Tensor,
        incoming: Vec<Tensor>,
        scale: Option<f64>,
    ) -> Result<(), Failure> {
        let mut terms = incoming;
        terms[self.index] = own.shallow_clone();
        // The term of a peer, which is not needed again.
        let partial = terms[usize::from(self.index == 0)].shallow_clone();
        add_in_rank_order(&terms, &partial, out, scale)
    }

    fn send(&self, tensor: &Tensor, peer: usize, stage: i32) -> Result<Option<Posted>, Failure> {
        self.post(tensor, || {
            let link = self.link(self.index, peer);
            ffi::send(link, borrow(tensor), peer as i32, self.tag(stage))
        })
    }

    fn recv(&self, tensor: &Tensor, peer: usize, stage: i32) -> Result<Option<Posted>, Failure> {
        self.post(tensor, || {
            let link = self.link(peer, self.index);
            ffi::recv(link, borrow(tensor), peer as i32, self.tag(stage))
        })
    }

    /// The connections for data from one rank to another.
    fn link(&self, from: usize, to: usize) -> &ffi::GroupHandle {
        if from < to {
            &self.upward
        } else {
            &self.downward
        }
    }

    /// Posts nothing for an empty chunk: both sides know that it is empty.
    fn post(
        &self,
        tensor: &Tensor,
        start: impl FnOnce() -> Result<Posted, cxx::Exception>,
    ) -> Result<Option<Posted>, Failure> {
        match tensor.numel() {
            0 => Ok(None),
            _ => start().map(Some).map_err(|e| e.what().to_owned()),
        }
    }

    /// Waits for sends and receives; the first failure closes the connections.
    fn wait_all(&self, posted: Vec<Posted>) -> Result<(), Failure> {
        wait_all(posted, || self.disconnect())
    }

    /// Closes the group's connections. A collective that failed halfway leaves data behind that the next one would
    /// receive, so the group is unusable; the closed connections notify the peers.
    pub(crate) fn disconnect(&self) {
        self.sockets.shutdown();
    }

    fn tag(&self, stage: i32) -> i32 {
        FIRST_TAG + 2 * (self.sequence % NUM_TAGS) as i32 + stage
    }
}

thread_local! {
    /// The receive buffers of this communication thread, one per type.
    static SCRATCH: RefCell<HashMap<i32, Tensor>> = RefCell::default();
}

/// The receive buffer of a direct collective, kept for the next one on the same thread.
struct Scratch {
    buffer: Tensor,
    length: i64,
    size: usize,
}

impl Scratch {
    /// A buffer for two chunks per peer: one being summed, one in flight.
    fn take(like: &Tensor, longest: i64, size: usize) -> Result<Scratch, Failure> {
        let needed = scratch_elements(longest, size);
        let cached = SCRATCH.with_borrow_mut(|scratch| scratch.remove(&(like.kind() as i32)));
        let buffer = match cached {
            Some(buffer) if buffer.numel() as i64 >= needed => buffer,
            _ => memory::scope(MemoryKind::Communication, || {
                like.f_new_empty([needed], (like.kind(), like.device()))
            })
            .map_err(error_text)?,
        };
        Ok(Scratch {
            buffer,
            length: chunk_length(size).min(longest),
            size,
        })
    }

    /// One tensor of `length` elements per rank for chunk `index`; the entry of `own` is empty.
    fn buffers(&self, own: usize, index: i64, length: i64) -> Result<Vec<Tensor>, Failure> {
        let first = (index % 2) * (self.size as i64 - 1) * self.length;
        (0..self.size)
            .map(|peer| {
                let (slot, length) = match peer.cmp(&own) {
                    Ordering::Less => (peer, length),
                    Ordering::Equal => (0, 0),
                    Ordering::Greater => (peer - 1, length),
                };
                let start = first + slot as i64 * self.length;
                self.buffer.f_narrow(0, start, length).map_err(error_text)
            })
            .collect()
    }

    /// Keeps the buffer for the next collective.
    fn keep(self) {
        let kind = self.buffer.kind() as i32;
        SCRATCH.with_borrow_mut(|scratch| scratch.insert(kind, self.buffer));
    }
}

/// `out` becomes the sum of the terms of all ranks, in rank order, times `scale`. Partial sums are in `partial`, which may
/// be the first or the second term; `out` may be any term.
pub(crate) fn add_in_rank_order(
    terms: &[Tensor],
    partial: &Tensor,
    out: &Tensor,
    scale: Option<f64>,
) -> Result<(), Failure> {
    let mut total = terms[0].shallow_clone();
    for (rank, term) in terms.iter().enumerate().skip(1) {
        let is_last = rank + 1 == terms.len();
        let target = if is_last { out } else { partial };
        total = total.f_add_out(target, term).map_err(error_text)?;
    }
    if let Some(scale) = scale {
        let _ = total.f_mul_scalar_(scale).map_err(error_text)?;
    }
    Ok(())
}

/// A range of a flat tensor.
pub(crate) fn slice(flat: &Tensor, range: Range<i64>) -> Result<Tensor, Failure> {
    flat.f_narrow(0, range.start, range.end - range.start)
        .map_err(error_text)
}

/// Chunk `index` of a shard; empty past the end of the shard.
fn chunk(shard: &Tensor, index: i64, length: i64) -> Result<Tensor, Failure> {
    let end = shard.numel() as i64;
    let start = (index * length).min(end);
    slice(shard, start..(start + length).min(end))
}

/// Waits for all sends and receives, so that none is in flight when their memory is reused, or until one fails.
///
/// After a failure, `on_failure` closes the connections and the rest is not waited for, because Gloo may report the
/// failure of another connection only after the timeout. The rest is leaked on purpose together with its memory, to
/// which Gloo could still write.
pub(crate) fn wait_all(posted: Vec<Posted>, on_failure: impl Fn()) -> Result<(), Failure> {
    let mut posted = posted.into_iter();
    for work in posted.by_ref() {
        if let Some(handle) = work.as_ref()
            && let Err(e) = ffi::work_wait(handle)
        {
            on_failure();
            posted.for_each(std::mem::forget);
            return Err(e.what().to_owned());
        }
    }
    Ok(())
}

pub(crate) fn error_text(e: tch::TchError) -> String {
    TorchError::from(e).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shards_tile_the_tensor_and_sends_match_the_formula(n in 0i64..10_000, size in 2usize..17) {
            let mut next = 0;
            let mut sends = 0;
            for index in 0..size {
                let range = shard(n, index, size);
                prop_assert_eq!(range.start, next);
                next = range.end;
                sends += all_reduce_sends(n, index, size);
            }
            prop_assert_eq!(next, n);
            prop_assert_eq!(sends, 2 * (size as u64 - 1) * n as u64);
        }
    }
}
