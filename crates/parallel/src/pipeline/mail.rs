//! What travels between stages: activations forward, their gradients back.

use std::collections::HashMap;

use tch::Tensor;
use trainyard_schedule::{Message, Schedule};
use trainyard_torch::{Group, Work as Pending, meta};
use trainyard_trace::Purpose;

use crate::error::{ParallelError, Result};

/// What a stage gives to the next.
#[derive(Debug)]
pub struct Shape {
    /// Lengths.
    pub size: Vec<i64>,
    /// A tensor of its type, where it lives.
    pub like: Tensor,
    /// Tokens of the micro-batch that it is of.
    pub num_tokens: u64,
    /// Ranks that share the micro-batch, each of which gives so much.
    pub num_sharers: u64,
}

impl Shape {
    /// Bytes that all ranks which share a batch of `num_tokens` give in one direction.
    pub(super) fn sent(&self, num_tokens: u64) -> u64 {
        let elements: i64 = self.size.iter().product();
        let bytes = elements as u64 * self.like.kind().elt_size_in_bytes() as u64;
        bytes * self.num_sharers * num_tokens / self.num_tokens.max(1)
    }
}

/// The messages of one step.
pub(super) struct Mail<'a> {
    schedule: &'a Schedule,
    group: &'a Group,
    shapes: &'a [Shape],
    /// On their way here.
    coming: HashMap<Message, (Tensor, Pending)>,
    /// Made here, for another of this rank's stages or not sent yet.
    here: HashMap<Message, Tensor>,
    /// On their way from here.
    going: HashMap<Message, Pending>,
}

impl<'a> Mail<'a> {
    pub(super) fn new(schedule: &'a Schedule, group: &'a Group, shapes: &'a [Shape]) -> Mail<'a> {
        Mail {
            schedule,
            group,
            shapes,
            coming: HashMap::new(),
            here: HashMap::new(),
            going: HashMap::new(),
        }
    }

    /// Asks for a message of another rank.
    pub(super) fn expect(&mut self, message: Message) -> Result<()> {
        let Shape { size, like, .. } = &self.shapes[message.from.min(message.to)];
        let tensor = meta::new_empty(like, size)?;
        let holder = self.schedule.holders[message.from];
        let tag = self.tag(message);
        let work = self.group.recv(&tensor, holder, tag, Purpose::Activation)?;
        self.coming.insert(message, (tensor, work));
        Ok(())
    }

    /// What a stage needs of its neighbour; waits for it.
    pub(super) fn take(&mut self, from: usize, to: usize, microbatch: usize) -> Result<Tensor> {
        let message = Message {
            from,
            to,
            microbatch,
        };
        if let Some(tensor) = self.here.remove(&message) {
            return Ok(tensor);
        }
        let missing = || ParallelError::ForeignStage { stage: from };
        let (tensor, work) = self.coming.remove(&message).ok_or_else(missing)?;
        work.wait()?;
        Ok(tensor)
    }

    /// Leaves what a stage has made for its neighbour.
    pub(super) fn put(&mut self, from: usize, to: usize, microbatch: usize, made: Tensor) {
        let message = Message {
            from,
            to,
            microbatch,
        };
        self.here.insert(message, made);
    }

    /// Sends what was left for another rank.
    pub(super) fn send(&mut self, message: Message) -> Result<()> {
        let missing = || ParallelError::ForeignStage {
            stage: message.from,
        };
        let made = self.here.remove(&message).ok_or_else(missing)?;
        let holder = self.schedule.holders[message.to];
        let (made, tag) = (made.f_contiguous()?, self.tag(message));
        let work = self.group.send(&made, holder, tag, Purpose::Activation)?;
        self.going.insert(message, work);
        Ok(())
    }

    /// A message has arrived, so its memory goes.
    pub(super) fn arrived(&mut self, message: Message) -> Result<()> {
        match self.going.remove(&message) {
            Some(work) => Ok(work.wait()?),
            None => Ok(()),
        }
    }

    /// Waits until everything has left.
    pub(super) fn finish(&mut self) -> Result<()> {
        for (_, work) in self.going.drain() {
            work.wait()?;
        }
        Ok(())
    }

    /// A number for every message of a step, as far as there are numbers; ranks that exchange more
    /// take them in the same order.
    fn tag(&self, message: Message) -> u16 {
        let number = message.to * self.schedule.num_microbatches + message.microbatch;
        let is_back = usize::from(message.from > message.to);
        ((2 * number + is_back) % usize::from(u16::MAX)) as u16
    }
}
