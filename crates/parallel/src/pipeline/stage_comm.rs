//! Point-to-point communication between stages: activations forward, their gradients backward.

use std::collections::HashMap;

use tch::Tensor;
use trainyard_schedule::{Message, Schedule};
use trainyard_torch::{Group, Work as Pending, meta};
use trainyard_trace::Purpose;

use crate::error::{ParallelError, Result};

/// The shape and type of the activations that a stage sends to the next stage.
#[derive(Debug)]
pub struct ActivationSpec {
    /// Shape of the tensor that one rank sends.
    pub size: Vec<i64>,
    /// An empty tensor with the type and device of the activations.
    pub like: Tensor,
    /// Tokens of the micro-batch.
    pub num_tokens: u64,
    /// Number of ranks over which the activations of the micro-batch are sharded: each sends its own shard.
    pub num_shards: u64,
}

impl ActivationSpec {
    /// Bytes that all ranks with a shard of `num_tokens` tokens send in one direction.
    pub(super) fn sent(&self, num_tokens: u64) -> u64 {
        let elements: i64 = self.size.iter().product();
        let bytes = elements as u64 * self.like.kind().elt_size_in_bytes() as u64;
        bytes * self.num_shards * num_tokens / self.num_tokens.max(1)
    }
}

/// The sends and receives of one step.
pub(super) struct StageComm<'a> {
    schedule: &'a Schedule,
    group: &'a Group,
    activations: &'a [ActivationSpec],
    pending_recvs: HashMap<Message, (Tensor, Pending)>,
    /// Outputs of this rank's stages: inputs of another of its stages, or not sent yet.
    outputs: HashMap<Message, Tensor>,
    pending_sends: HashMap<Message, Pending>,
}

impl<'a> StageComm<'a> {
    pub(super) fn new(
        schedule: &'a Schedule,
        group: &'a Group,
        activations: &'a [ActivationSpec],
    ) -> StageComm<'a> {
        StageComm {
            schedule,
            group,
            activations,
            pending_recvs: HashMap::new(),
            outputs: HashMap::new(),
            pending_sends: HashMap::new(),
        }
    }

    /// Posts a receive from another rank.
    pub(super) fn post_recv(&mut self, message: Message) -> Result<()> {
        let ActivationSpec { size, like, .. } = &self.activations[message.from.min(message.to)];
        let tensor = meta::new_empty(like, size)?;
        let peer = self.schedule.stage_to_rank[message.from];
        let tag = self.tag(message);
        let work = self.group.recv(&tensor, peer, tag, Purpose::Activation)?;
        self.pending_recvs.insert(message, (tensor, work));
        Ok(())
    }

    /// Waits for the input of a stage from a neighboring stage.
    pub(super) fn wait_input(
        &mut self,
        from: usize,
        to: usize,
        microbatch: usize,
    ) -> Result<Tensor> {
        let message = Message {
            from,
            to,
            microbatch,
        };
        if let Some(tensor) = self.outputs.remove(&message) {
            return Ok(tensor);
        }
        let missing = || ParallelError::UnexpectedTask { stage: from };
        let (tensor, work) = self.pending_recvs.remove(&message).ok_or_else(missing)?;
        work.wait()?;
        Ok(tensor)
    }

    /// Stores the output of a stage for a neighboring stage.
    pub(super) fn put_output(&mut self, from: usize, to: usize, microbatch: usize, output: Tensor) {
        let message = Message {
            from,
            to,
            microbatch,
        };
        self.outputs.insert(message, output);
    }

    /// Starts to send a stored output to another rank.
    pub(super) fn send(&mut self, message: Message) -> Result<()> {
        let missing = || ParallelError::UnexpectedTask {
            stage: message.from,
        };
        let output = self.outputs.remove(&message).ok_or_else(missing)?;
        let peer = self.schedule.stage_to_rank[message.to];
        let (output, tag) = (output.f_contiguous()?, self.tag(message));
        let work = self.group.send(&output, peer, tag, Purpose::Activation)?;
        self.pending_sends.insert(message, work);
        Ok(())
    }

    /// Waits for a send and releases its memory.
    pub(super) fn wait_send(&mut self, message: Message) -> Result<()> {
        match self.pending_sends.remove(&message) {
            Some(work) => Ok(work.wait()?),
            None => Ok(()),
        }
    }

    /// Waits for all pending sends.
    pub(super) fn finish(&mut self) -> Result<()> {
        for (_, work) in self.pending_sends.drain() {
            work.wait()?;
        }
        Ok(())
    }

    /// The tag of a message, unique within a step as long as tags suffice. If they wrap around, messages with
    /// equal tags still match, since both ranks post them in the same order.
    fn tag(&self, message: Message) -> u16 {
        let number = message.to * self.schedule.num_microbatches + message.microbatch;
        let is_backward = usize::from(message.from > message.to);
        ((2 * number + is_backward) % usize::from(u16::MAX)) as u16
    }
}
