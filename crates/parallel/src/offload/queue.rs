//! Scheduling of reads, writes and buffers, as a pure state machine without files, threads or tensors.
//!
//! A record is in one stage at a time: on disk, queued for reading, being read, ready, or taken. In addition its last
//! write may be in progress; a read of the record starts only after that. Since only a taken record is written, and
//! it is taken only after its read has finished, no other ordering is needed.

use std::collections::VecDeque;
use std::mem;

use super::error::OffloadError;
use super::file::Content;

/// The stage of a record, with the buffer `B` that it occupies.
enum Stage<B> {
    OnDisk,
    Queued(B),
    Reading,
    Ready(B),
    Failed(OffloadError),
    Taken,
}

struct Slot<B> {
    stage: Stage<B>,
    content: Content,
    is_writing: bool,
}

/// The result of a prefetch.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Prefetch {
    /// The record is queued, being read, or ready.
    Queued,
    /// No buffer is free.
    NoBuffer,
    /// The caller already holds the record.
    Taken,
}

/// The result of a claim.
pub(super) enum Claim<B> {
    /// The record is in this buffer.
    Ready(B),
    /// Claim again after a change: a read or a write is in progress or can start.
    Wait,
    /// The read failed.
    Failed(OffloadError),
    /// The caller holds all buffers.
    NoBuffer,
    /// The caller already holds the record.
    Taken,
}

/// The stages of all records, and the buffers.
pub(super) struct Queue<B> {
    slots: Vec<Slot<B>>,
    free: Vec<B>,
    /// Prefetched records that are not taken yet, most urgent first.
    ahead: VecDeque<usize>,
    writes: VecDeque<(usize, B)>,
    /// Number of writes queued or in progress.
    num_writing: usize,
}

impl<B> Queue<B> {
    pub(super) fn new(num_records: usize, buffers: Vec<B>) -> Queue<B> {
        let slot = || Slot {
            stage: Stage::OnDisk,
            content: Content::Zeros,
            is_writing: false,
        };
        Queue {
            slots: std::iter::repeat_with(slot).take(num_records).collect(),
            free: buffers,
            ahead: VecDeque::new(),
            writes: VecDeque::new(),
            num_writing: 0,
        }
    }

    /// Queues a read of a record that will be needed after all those queued before.
    pub(super) fn prefetch(&mut self, record: usize) -> Prefetch {
        match self.slots[record].stage {
            Stage::Taken => return Prefetch::Taken,
            Stage::OnDisk => (),
            _ => return Prefetch::Queued,
        }
        let Some(buffer) = self.free.pop() else {
            return Prefetch::NoBuffer;
        };
        self.slots[record].stage = Stage::Queued(buffer);
        self.ahead.push_back(record);
        Prefetch::Queued
    }

    /// Claims a record that is needed now: its read goes first, and may evict a prefetched record.
    pub(super) fn claim(&mut self, record: usize) -> Claim<B> {
        match mem::replace(&mut self.slots[record].stage, Stage::OnDisk) {
            Stage::OnDisk => return self.claim_from_disk(record),
            Stage::Ready(buffer) => {
                self.dequeue(record);
                self.slots[record].stage = Stage::Taken;
                return Claim::Ready(buffer);
            }
            Stage::Failed(e) => {
                self.dequeue(record);
                return Claim::Failed(e);
            }
            waiting_or_taken => self.slots[record].stage = waiting_or_taken,
        }
        if matches!(self.slots[record].stage, Stage::Taken) {
            return Claim::Taken;
        }
        self.prioritize(record);
        Claim::Wait
    }

    fn claim_from_disk(&mut self, record: usize) -> Claim<B> {
        // A write frees its buffer soon; a finished read is evicted only if there is none.
        if self.free.is_empty() && self.num_writing == 0 && !self.evict() {
            let is_reading = |slot: &Slot<B>| matches!(slot.stage, Stage::Reading);
            return if self.slots.iter().any(is_reading) {
                Claim::Wait
            } else {
                Claim::NoBuffer
            };
        }
        if self.prefetch(record) == Prefetch::Queued {
            self.prioritize(record);
        }
        Claim::Wait
    }

    fn dequeue(&mut self, record: usize) {
        self.ahead.retain(|&other| other != record);
    }

    fn prioritize(&mut self, record: usize) {
        self.dequeue(record);
        self.ahead.push_front(record);
    }

    /// Evicts the prefetched record that is needed last.
    fn evict(&mut self) -> bool {
        let holds = |&record: &usize| {
            matches!(self.slots[record].stage, Stage::Queued(_) | Stage::Ready(_))
        };
        let Some(record) = self.ahead.iter().copied().rfind(holds) else {
            return false;
        };
        self.dequeue(record);
        match mem::replace(&mut self.slots[record].stage, Stage::OnDisk) {
            Stage::Queued(buffer) | Stage::Ready(buffer) => self.free.push(buffer),
            _ => (),
        }
        true
    }

    /// The next read: the most urgent one whose record is not being written.
    pub(super) fn next_read(&mut self) -> Option<(usize, B, Content)> {
        let can_begin = |&record: &usize| {
            let slot = &self.slots[record];
            matches!(slot.stage, Stage::Queued(_)) && !slot.is_writing
        };
        let record = self.ahead.iter().copied().find(can_begin)?;
        let slot = &mut self.slots[record];
        match mem::replace(&mut slot.stage, Stage::Reading) {
            Stage::Queued(buffer) => Some((record, buffer, slot.content)),
            other => {
                slot.stage = other;
                None
            }
        }
    }

    /// Finishes a read.
    pub(super) fn read_done(&mut self, record: usize, buffer: B, result: Result<(), OffloadError>) {
        self.slots[record].stage = match result {
            Ok(()) => Stage::Ready(buffer),
            Err(e) => {
                self.free.push(buffer);
                Stage::Failed(e)
            }
        };
    }

    /// Queues the write of a taken record.
    pub(super) fn put(&mut self, record: usize, buffer: B) {
        let slot = &mut self.slots[record];
        slot.stage = Stage::OnDisk;
        slot.is_writing = true;
        self.writes.push_back((record, buffer));
        self.num_writing += 1;
    }

    /// Releases a taken record without writing it.
    pub(super) fn release(&mut self, record: usize, buffer: B) {
        self.slots[record].stage = Stage::OnDisk;
        self.free.push(buffer);
    }

    /// The next write, in order.
    pub(super) fn next_write(&mut self) -> Option<(usize, B)> {
        self.writes.pop_front()
    }

    /// Finishes a write, after which the file contains `content`.
    pub(super) fn write_done(&mut self, record: usize, buffer: B, content: Content) {
        let slot = &mut self.slots[record];
        slot.content = content;
        slot.is_writing = false;
        self.free.push(buffer);
        self.num_writing -= 1;
    }

    /// Whether a write is queued or in progress.
    pub(super) fn is_writing(&self) -> bool {
        self.num_writing > 0
    }
}

#[cfg(test)]
mod tests;
