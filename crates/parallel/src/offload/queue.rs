//! What is read and written next, and with which buffer: decisions only, without files, threads or
//! tensors.
//!
//! A record is in one stage at a time: on disk, asked for, being read, ready, or taken. Beside that
//! its last write may be under way; a read of it begins only after that. Since writing needs a
//! taken record and taking needs its read to be over, nothing else can be out of order.

use std::collections::VecDeque;
use std::mem;

use super::error::OffloadError;
use super::file::Content;

/// Where a record is, with the buffer `B` that is its own meanwhile.
enum Stage<B> {
    OnDisk,
    Asked(B),
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

/// What became of asking for a record ahead of its use.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// It is on its way, or there.
    Coming,
    /// No buffer is free.
    NoBuffer,
    /// The caller has it.
    Taken,
}

/// What became of wanting a record now.
pub(super) enum Claim<B> {
    /// Here it is.
    Ready(B),
    /// Ask again when something has changed: a read or a write is under way or was made possible.
    Wait,
    /// Its read failed.
    Failed(OffloadError),
    /// The caller has every buffer.
    NoBuffer,
    /// The caller has it.
    Taken,
}

/// All records and all buffers.
pub(super) struct Queue<B> {
    slots: Vec<Slot<B>>,
    free: Vec<B>,
    /// Records asked for and not taken yet, most urgent first.
    ahead: VecDeque<usize>,
    writes: VecDeque<(usize, B)>,
    /// Writes queued or under way.
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

    /// Asks for a record that will be wanted after all those asked for before.
    pub(super) fn ask(&mut self, record: usize) -> Asked {
        match self.slots[record].stage {
            Stage::Taken => return Asked::Taken,
            Stage::OnDisk => (),
            _ => return Asked::Coming,
        }
        let Some(buffer) = self.free.pop() else {
            return Asked::NoBuffer;
        };
        self.slots[record].stage = Stage::Asked(buffer);
        self.ahead.push_back(record);
        Asked::Coming
    }

    /// Wants a record now: before all others, and at the cost of a read ahead if need be.
    pub(super) fn claim(&mut self, record: usize) -> Claim<B> {
        match mem::replace(&mut self.slots[record].stage, Stage::OnDisk) {
            Stage::OnDisk => return self.claim_from_disk(record),
            Stage::Ready(buffer) => {
                self.forget(record);
                self.slots[record].stage = Stage::Taken;
                return Claim::Ready(buffer);
            }
            Stage::Failed(e) => {
                self.forget(record);
                return Claim::Failed(e);
            }
            waiting_or_taken => self.slots[record].stage = waiting_or_taken,
        }
        if matches!(self.slots[record].stage, Stage::Taken) {
            return Claim::Taken;
        }
        self.hurry(record);
        Claim::Wait
    }

    fn claim_from_disk(&mut self, record: usize) -> Claim<B> {
        // A write gives its buffer back soon; only without one is a finished read thrown away.
        if self.free.is_empty() && self.num_writing == 0 && !self.evict() {
            let is_reading = |slot: &Slot<B>| matches!(slot.stage, Stage::Reading);
            return match self.slots.iter().any(is_reading) {
                true => Claim::Wait,
                false => Claim::NoBuffer,
            };
        }
        if self.ask(record) == Asked::Coming {
            self.hurry(record);
        }
        Claim::Wait
    }

    fn forget(&mut self, record: usize) {
        self.ahead.retain(|&other| other != record);
    }

    fn hurry(&mut self, record: usize) {
        self.forget(record);
        self.ahead.push_front(record);
    }

    /// Gives up the read ahead that is needed last.
    fn evict(&mut self) -> bool {
        let holds =
            |&record: &usize| matches!(self.slots[record].stage, Stage::Asked(_) | Stage::Ready(_));
        let Some(record) = self.ahead.iter().copied().rfind(holds) else {
            return false;
        };
        self.forget(record);
        match mem::replace(&mut self.slots[record].stage, Stage::OnDisk) {
            Stage::Asked(buffer) | Stage::Ready(buffer) => self.free.push(buffer),
            _ => (),
        }
        true
    }

    /// The read to do now: the most urgent whose record is not being written.
    pub(super) fn next_read(&mut self) -> Option<(usize, B, Content)> {
        let can_begin = |&record: &usize| {
            let slot = &self.slots[record];
            matches!(slot.stage, Stage::Asked(_)) && !slot.is_writing
        };
        let record = self.ahead.iter().copied().find(can_begin)?;
        let slot = &mut self.slots[record];
        match mem::replace(&mut slot.stage, Stage::Reading) {
            Stage::Asked(buffer) => Some((record, buffer, slot.content)),
            other => {
                slot.stage = other;
                None
            }
        }
    }

    /// A read is over.
    pub(super) fn read_done(&mut self, record: usize, buffer: B, result: Result<(), OffloadError>) {
        self.slots[record].stage = match result {
            Ok(()) => Stage::Ready(buffer),
            Err(e) => {
                self.free.push(buffer);
                Stage::Failed(e)
            }
        };
    }

    /// A taken record is to be written.
    pub(super) fn put(&mut self, record: usize, buffer: B) {
        let slot = &mut self.slots[record];
        slot.stage = Stage::OnDisk;
        slot.is_writing = true;
        self.writes.push_back((record, buffer));
        self.num_writing += 1;
    }

    /// A taken record is done with and stays as the file has it.
    pub(super) fn give_back(&mut self, record: usize, buffer: B) {
        self.slots[record].stage = Stage::OnDisk;
        self.free.push(buffer);
    }

    /// The write to do now: they are done in order.
    pub(super) fn next_write(&mut self) -> Option<(usize, B)> {
        self.writes.pop_front()
    }

    /// A write is over, and the file now holds `content`.
    pub(super) fn write_done(&mut self, record: usize, buffer: B, content: Content) {
        let slot = &mut self.slots[record];
        slot.content = content;
        slot.is_writing = false;
        self.free.push(buffer);
        self.num_writing -= 1;
    }

    /// Whether a write is queued or under way.
    pub(super) fn is_writing(&self) -> bool {
        self.num_writing > 0
    }
}

#[cfg(test)]
mod tests;
