//! Collectives composed of direct messages, where that beats Gloo's own.
//!
//! Gloo's reduce-scatter puts an all-reduce's bytes on the wire and its all-gather goes round a ring.
//! Here every rank sends each peer exactly what that peer needs, at once, and sums what it receives
//! in rank order: no byte more than the closed form, and a result that does not depend on timing.
//!
//! Messages to higher ranks and to lower ones go over connections of their own. Gloo locks a
//! connection while it writes, and its reading thread meanwhile asks again and again whether it may
//! read: both ways over one connection, a tenth of the processor was spent on that.

use std::cell::RefCell;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use cxx::{SharedPtr, UniquePtr};
use tch::Tensor;
use trainyard_trace::MemoryKind;

use crate::border::borrow;
use crate::bridge::ffi;
use crate::memory;
use crate::sockets::Sockets;

/// Elements of the flat tensor that rank `index` of `size` reduces: ceil chunks, like `torch.chunk`.
pub(crate) fn shard(num_elements: i64, index: usize, size: usize) -> Range<i64> {
    let size = size as i64;
    let chunk = (num_elements + size - 1) / size;
    let start = (chunk * index as i64).min(num_elements);
    start..(start + chunk).min(num_elements)
}

/// Elements this rank sends in an all-reduce: each peer's shard once, and its own reduced one to all.
pub(crate) fn all_reduce_sends(num_elements: i64, index: usize, size: usize) -> u64 {
    let own = shard(num_elements, index, size);
    let own = own.end - own.start;
    (num_elements - own + (size as i64 - 1) * own) as u64
}

/// Elements of a piece: a megabyte in single precision, which the cache holds. Less where many peers
/// send at once, so that what comes in stays within [`MOST_ROOM`].
fn piece_length(size: usize) -> i64 {
    let peers = (size as i64 - 1).max(1);
    (MOST_ROOM / 2 / peers).clamp(SMALLEST_PIECE, LARGEST_PIECE)
}

const LARGEST_PIECE: i64 = 1 << 18;
/// Below this, messages cost more than the memory they save.
const SMALLEST_PIECE: i64 = 1 << 12;
/// Elements of the room for what comes in: two pieces of every peer.
const MOST_ROOM: i64 = 1 << 20;

/// Elements of the room that a sum over `size` ranks needs whose shards have up to `length` elements.
pub(crate) fn room_for(length: i64, size: usize) -> i64 {
    2 * (size as i64 - 1) * piece_length(size).min(length)
}

/// Tags of composed collectives lie above those of the user's messages.
const FIRST_TAG: i32 = 1 << 24;
const NUM_TAGS: u64 = 1 << 20;

/// A group as composed collectives see it, for one of them.
pub(crate) struct Peers {
    pub upward: SharedPtr<ffi::GroupHandle>,
    pub downward: SharedPtr<ffi::GroupHandle>,
    pub index: usize,
    pub size: usize,
    pub sequence: u64,
    pub sockets: Arc<Sockets>,
}

// SAFETY: the handle is thread safe (see bridge.rs).
unsafe impl Send for Peers {}

type Failed = String;
type Posted = UniquePtr<ffi::WorkHandle>;

impl Peers {
    /// Every rank's `tensor` becomes the sum over ranks, times `scale`.
    pub(crate) fn all_reduce(&self, tensor: &Tensor, scale: Option<f64>) -> Result<(), Failed> {
        let flat = tensor.f_view(-1).map_err(words)?;
        let shard_of = |index| part(&flat, shard(flat.numel() as i64, index, self.size));
        let shards = (0..self.size)
            .map(shard_of)
            .collect::<Result<Vec<_>, _>>()?;
        let own = &shards[self.index];
        let num_pieces = self.num_pieces(&shards[0]);
        let piece = |shard: &Tensor, index| piece(shard, index, piece_length(self.size));
        let mut answers = Vec::new();
        for peer in self.others() {
            for index in 0..num_pieces {
                // Posted before it can arrive: a peer answers only once it has what we send it, so
                // this memory has been read by then.
                answers.extend(self.recv(&piece(&shards[peer], index)?, peer, 1)?);
            }
        }
        self.sum_pieces(&shards, own, num_pieces, scale, |index| {
            for peer in self.others() {
                answers.extend(self.send(&piece(own, index)?, peer, 1)?);
            }
            Ok(())
        })?;
        self.wait_all(answers)
    }

    /// `out` becomes this rank's part of the sum over ranks of `input`, times `scale`.
    pub(crate) fn reduce_scatter(
        &self,
        out: &Tensor,
        input: &Tensor,
        scale: Option<f64>,
    ) -> Result<(), Failed> {
        let rows = input.f_view([self.size as i64, -1]).map_err(words)?;
        let row = |index: usize| rows.f_get(index as i64).map_err(words);
        let shards = (0..self.size).map(row).collect::<Result<Vec<_>, _>>()?;
        let out = out.f_view(-1).map_err(words)?;
        self.sum_pieces(
            &shards,
            &out,
            self.num_pieces(&shards[0]),
            scale,
            |_| Ok(()),
        )
    }

    /// Sends every peer its shard, and makes `out` the sum of what comes in with our own, a piece at
    /// a time: while one is summed the next is on its way, and what is summed is still in the cache.
    /// `done` is told of every piece of `out` that is complete.
    fn sum_pieces(
        &self,
        shards: &[Tensor],
        out: &Tensor,
        num_pieces: i64,
        scale: Option<f64>,
        mut done: impl FnMut(i64) -> Result<(), Failed>,
    ) -> Result<(), Failed> {
        let own = &shards[self.index];
        let piece = |shard: &Tensor, index| piece(shard, index, piece_length(self.size));
        let scratch = Scratch::take(own, shards[0].numel() as i64, self.size)?;
        let start = |index: i64| -> Result<(Vec<Tensor>, Vec<Posted>), Failed> {
            let incoming = scratch.room(self.index, index, piece(own, index)?.numel() as i64)?;
            let mut posted = Vec::new();
            for peer in self.others() {
                posted.extend(self.recv(&incoming[peer], peer, 0)?);
            }
            for peer in self.others() {
                posted.extend(self.send(&piece(&shards[peer], index)?, peer, 0)?);
            }
            Ok((incoming, posted))
        };
        let mut under_way = Some(start(0)?);
        for index in 0..num_pieces {
            let next = match index + 1 < num_pieces {
                true => Some(start(index + 1)?),
                false => None,
            };
            if let Some((incoming, posted)) = std::mem::replace(&mut under_way, next) {
                self.wait_all(posted)?;
                let (out, own) = (piece(out, index)?, piece(own, index)?);
                self.sum_in_rank_order(&out, &own, incoming, scale)?;
            }
            done(index)?;
        }
        scratch.give_back();
        Ok(())
    }

    /// How many pieces the longest shard has; shorter ones have empty pieces at the end.
    fn num_pieces(&self, longest: &Tensor) -> i64 {
        let length = longest.numel() as i64;
        let piece = piece_length(self.size);
        ((length + piece - 1) / piece).max(1)
    }

    /// `out` becomes every rank's `input`, in rank order.
    pub(crate) fn all_gather(&self, out: &Tensor, input: &Tensor) -> Result<(), Failed> {
        let rows = out.f_view([self.size as i64, -1]).map_err(words)?;
        let row = |index: usize| rows.f_get(index as i64).map_err(words);
        let mut posted = Vec::new();
        for peer in self.others() {
            posted.extend(self.recv(&row(peer)?, peer, 0)?);
        }
        for peer in self.others() {
            posted.extend(self.send(input, peer, 0)?);
        }
        // In place when the input already is our row of the output.
        let mut own = row(self.index)?;
        if own.data_ptr() != input.data_ptr() {
            own.f_copy_(&input.f_view(-1).map_err(words)?)
                .map_err(words)?;
        }
        self.wait_all(posted)
    }

    /// Peers in the order to talk to them: the next one first, so that not all talk to rank 0 at once.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (index, size) = (self.index, self.size);
        (1..size).map(move |step| (index + step) % size)
    }

    /// `out = scale * sum over ranks`, added in rank order whatever arrived first.
    fn sum_in_rank_order(
        &self,
        out: &Tensor,
        own: &Tensor,
        incoming: Vec<Tensor>,
        scale: Option<f64>,
    ) -> Result<(), Failed> {
        let term = |rank: usize| match rank == self.index {
            true => own.shallow_clone(),
            false => incoming[rank].shallow_clone(),
        };
        // The first sum goes to memory that holds no term still to be added.
        let mut total = term(0);
        for rank in 1..self.size {
            let next = term(rank);
            let target = match (rank + 1 == self.size, self.index == 0 && rank == 1) {
                (true, _) => out.shallow_clone(),
                (false, true) => next.shallow_clone(),
                (false, false) => total.shallow_clone(),
            };
            total = total.f_add_out(&target, &next).map_err(words)?;
        }
        if let Some(scale) = scale {
            let _ = total.f_mul_scalar_(scale).map_err(words)?;
        }
        Ok(())
    }

    fn send(&self, tensor: &Tensor, peer: usize, stage: i32) -> Result<Option<Posted>, Failed> {
        self.post(tensor, || {
            let way = self.way(self.index, peer);
            ffi::send(way, borrow(tensor), peer as i32, self.tag(stage))
        })
    }

    fn recv(&self, tensor: &Tensor, peer: usize, stage: i32) -> Result<Option<Posted>, Failed> {
        self.post(tensor, || {
            let way = self.way(peer, self.index);
            ffi::recv(way, borrow(tensor), peer as i32, self.tag(stage))
        })
    }

    /// The connections for messages from one rank to another.
    fn way(&self, from: usize, to: usize) -> &ffi::GroupHandle {
        match from < to {
            true => &self.upward,
            false => &self.downward,
        }
    }

    /// Nothing is sent of an empty piece: both sides know that it is empty.
    fn post(
        &self,
        tensor: &Tensor,
        start: impl FnOnce() -> Result<Posted, cxx::Exception>,
    ) -> Result<Option<Posted>, Failed> {
        match tensor.numel() {
            0 => Ok(None),
            _ => start().map(Some).map_err(|e| e.what().to_owned()),
        }
    }

    /// Waits for messages; the first that fails ends the others too.
    fn wait_all(&self, posted: Vec<Posted>) -> Result<(), Failed> {
        wait_all(posted, || self.leave())
    }

    /// A collective that failed half way leaves messages behind that would be taken for others:
    /// the group is of no use any more, and peers are told by closed connections.
    pub(crate) fn leave(&self) {
        self.sockets.shut();
    }

    fn tag(&self, stage: i32) -> i32 {
        FIRST_TAG + 2 * (self.sequence % NUM_TAGS) as i32 + stage
    }
}

thread_local! {
    /// The room of this lane: one buffer per type, large enough for what was needed so far.
    static ROOM: RefCell<HashMap<i32, Tensor>> = RefCell::default();
}

/// Room for what comes in, kept from one collective of a lane to the next.
struct Scratch {
    buffer: Tensor,
    length: i64,
    size: usize,
}

impl Scratch {
    /// Room for two pieces of every peer: one being summed, one on its way.
    fn take(like: &Tensor, longest: i64, size: usize) -> Result<Scratch, Failed> {
        let needed = room_for(longest, size);
        let kept = ROOM.with_borrow_mut(|room| room.remove(&(like.kind() as i32)));
        let buffer = match kept {
            Some(buffer) if buffer.numel() as i64 >= needed => buffer,
            _ => memory::scope(MemoryKind::Communication, || {
                like.f_new_empty([needed], (like.kind(), like.device()))
            })
            .map_err(words)?,
        };
        Ok(Scratch {
            buffer,
            length: piece_length(size).min(longest),
            size,
        })
    }

    /// One tensor per rank for piece `index`, of `length` elements each; `own` needs none, and its
    /// place holds an empty one.
    fn room(&self, own: usize, index: i64, length: i64) -> Result<Vec<Tensor>, Failed> {
        let first = (index % 2) * (self.size as i64 - 1) * self.length;
        (0..self.size)
            .map(|peer| {
                let (place, length) = match peer.cmp(&own) {
                    Ordering::Less => (peer, length),
                    Ordering::Equal => (0, 0),
                    Ordering::Greater => (peer - 1, length),
                };
                let start = first + place as i64 * self.length;
                self.buffer.f_narrow(0, start, length).map_err(words)
            })
            .collect()
    }

    fn give_back(self) {
        let kind = self.buffer.kind() as i32;
        ROOM.with_borrow_mut(|room| room.insert(kind, self.buffer));
    }
}

/// Elements of a flat tensor.
fn part(flat: &Tensor, range: Range<i64>) -> Result<Tensor, Failed> {
    flat.f_narrow(0, range.start, range.end - range.start)
        .map_err(words)
}

/// Piece `index` of a shard: empty where the shard has ended.
fn piece(shard: &Tensor, index: i64, piece: i64) -> Result<Tensor, Failed> {
    let length = shard.numel() as i64;
    let start = (index * piece).min(length);
    part(shard, start..(start + piece).min(length))
}

/// Waits for every message, so that none is still under way when memory is reused, or until one fails.
///
/// Then `on_failure` ends the connections and the rest is not waited for: Gloo may tell a message of
/// another connection only when its time is up. What is left is leaked on purpose, and with it the
/// memory it stands on, which nobody else may have while Gloo could still write there.
pub(crate) fn wait_all(posted: Vec<Posted>, on_failure: impl Fn()) -> Result<(), Failed> {
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

fn words(e: tch::TchError) -> String {
    e.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shards_tile_and_sends_add_up(n in 0i64..10_000, size in 2usize..17) {
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
