//! Collectives composed of direct messages, where that beats Gloo's own.
//!
//! Gloo's reduce-scatter puts an all-reduce's bytes on the wire and its all-gather goes round a ring.
//! Here every rank sends each peer exactly what that peer needs, at once, and sums what it receives
//! in rank order: no byte more than the closed form, and a result that does not depend on timing.

use std::ops::Range;

use cxx::{SharedPtr, UniquePtr};
use tch::Tensor;

use crate::border::borrow;
use crate::bridge::ffi;

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

/// Tags of composed collectives lie above those of the user's messages.
const FIRST_TAG: i32 = 1 << 24;
const NUM_TAGS: u64 = 1 << 20;

/// A group as composed collectives see it, for one of them.
pub(crate) struct Peers {
    pub group: SharedPtr<ffi::GroupHandle>,
    pub index: usize,
    pub size: usize,
    pub sequence: u64,
}

// SAFETY: the handle is thread safe (see bridge.rs).
unsafe impl Send for Peers {}

type Failed = String;
type Posted = UniquePtr<ffi::WorkHandle>;

impl Peers {
    /// Every rank's `tensor` becomes the sum over ranks, times `scale`.
    pub(crate) fn all_reduce(&self, tensor: &Tensor, scale: Option<f64>) -> Result<(), Failed> {
        let flat = tensor.f_view(-1).map_err(words)?;
        let num_elements = flat.numel() as i64;
        let part = |index| {
            let range = shard(num_elements, index, self.size);
            flat.f_narrow(0, range.start, range.end - range.start)
                .map_err(words)
        };
        let own = part(self.index)?;
        let incoming = self.scratch(&own)?;
        let mut first = Vec::new();
        let mut second = Vec::new();
        for peer in self.others() {
            first.push(self.recv(&incoming[peer], peer, 0)?);
            // Posted before it can arrive: a peer answers only once it has what we send below, so
            // this memory has been read by then.
            second.push(self.recv(&part(peer)?, peer, 1)?);
        }
        for peer in self.others() {
            first.push(self.send(&part(peer)?, peer, 0)?);
        }
        wait_all(first)?;
        self.sum_in_rank_order(&own, &own, incoming, scale)?;
        for peer in self.others() {
            second.push(self.send(&own, peer, 1)?);
        }
        wait_all(second)
    }

    /// `out` becomes this rank's part of the sum over ranks of `input`, times `scale`.
    pub(crate) fn reduce_scatter(
        &self,
        out: &Tensor,
        input: &Tensor,
        scale: Option<f64>,
    ) -> Result<(), Failed> {
        let rows = input.f_view([self.size as i64, -1]).map_err(words)?;
        let own = rows.f_get(self.index as i64).map_err(words)?;
        let incoming = self.scratch(&own)?;
        let mut posted = Vec::new();
        for peer in self.others() {
            posted.push(self.recv(&incoming[peer], peer, 0)?);
        }
        for peer in self.others() {
            let row = rows.f_get(peer as i64).map_err(words)?;
            posted.push(self.send(&row, peer, 0)?);
        }
        wait_all(posted)?;
        let out = out.f_view(-1).map_err(words)?;
        self.sum_in_rank_order(&out, &own, incoming, scale)
    }

    /// `out` becomes every rank's `input`, in rank order.
    pub(crate) fn all_gather(&self, out: &Tensor, input: &Tensor) -> Result<(), Failed> {
        let rows = out.f_view([self.size as i64, -1]).map_err(words)?;
        let row = |index: usize| rows.f_get(index as i64).map_err(words);
        let mut posted = Vec::new();
        for peer in self.others() {
            posted.push(self.recv(&row(peer)?, peer, 0)?);
        }
        for peer in self.others() {
            posted.push(self.send(input, peer, 0)?);
        }
        // In place when the input already is our row of the output.
        let mut own = row(self.index)?;
        if own.data_ptr() != input.data_ptr() {
            own.f_copy_(&input.f_view(-1).map_err(words)?)
                .map_err(words)?;
        }
        wait_all(posted)
    }

    /// Peers in the order to talk to them: the next one first, so that not all talk to rank 0 at once.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (index, size) = (self.index, self.size);
        (1..size).map(move |step| (index + step) % size)
    }

    /// One buffer per rank for what comes in; our own place stays empty.
    fn scratch(&self, like: &Tensor) -> Result<Vec<Tensor>, Failed> {
        (0..self.size)
            .map(|peer| match peer == self.index {
                true => Ok(Tensor::new()),
                false => like.f_empty_like().map_err(words),
            })
            .collect()
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

    fn send(&self, tensor: &Tensor, peer: usize, stage: i32) -> Result<Posted, Failed> {
        ffi::send(&self.group, borrow(tensor), peer as i32, self.tag(stage))
            .map_err(|e| e.what().to_owned())
    }

    fn recv(&self, tensor: &Tensor, peer: usize, stage: i32) -> Result<Posted, Failed> {
        ffi::recv(&self.group, borrow(tensor), peer as i32, self.tag(stage))
            .map_err(|e| e.what().to_owned())
    }

    fn tag(&self, stage: i32) -> i32 {
        FIRST_TAG + 2 * (self.sequence % NUM_TAGS) as i32 + stage
    }
}

/// Waits for every message, so that none is still under way when memory is reused, and then reports
/// the first failure.
pub(crate) fn wait_all(posted: Vec<Posted>) -> Result<(), Failed> {
    let mut outcome = Ok(());
    for work in &posted {
        if let Some(work) = work.as_ref()
            && let Err(e) = ffi::work_wait(work)
            && outcome.is_ok()
        {
            outcome = Err(e.what().to_owned());
        }
    }
    outcome
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
