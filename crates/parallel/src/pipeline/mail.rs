//! What travels between stages: activations forward, their gradients back.

use std::collections::HashMap;

use tch::Tensor;
use trainyard_schedule::{Schedule, Task, Work};
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

/// A message, by the stage and micro-batch that it is for.
type Address = (usize, usize, Way);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Way {
    Forward,
    Backward,
}

/// The messages of one step.
pub(super) struct Mail<'a> {
    schedule: &'a Schedule,
    group: &'a Group,
    shapes: &'a [Shape],
    /// On their way here.
    coming: HashMap<Address, (Tensor, Pending)>,
    /// From one of this rank's stages to another of them.
    here: HashMap<Address, Tensor>,
    /// On their way from here.
    going: Vec<Pending>,
}

impl<'a> Mail<'a> {
    pub(super) fn new(schedule: &'a Schedule, group: &'a Group, shapes: &'a [Shape]) -> Mail<'a> {
        Mail {
            schedule,
            group,
            shapes,
            coming: HashMap::new(),
            here: HashMap::new(),
            going: Vec::new(),
        }
    }

    /// Asks for what a task needs, if another rank has it and it was not asked for yet.
    pub(super) fn expect(&mut self, task: Task) -> Result<()> {
        let Some((address, from, boundary)) = self.needs(task) else {
            return Ok(());
        };
        let holder = self.schedule.holders[from];
        if holder == self.group.index() || self.coming.contains_key(&address) {
            return Ok(());
        }
        let Shape { size, like, .. } = &self.shapes[boundary];
        let tensor = meta::new_empty(like, size)?;
        let work = self
            .group
            .recv(&tensor, holder, self.tag(address), Purpose::Activation)?;
        self.coming.insert(address, (tensor, work));
        Ok(())
    }

    /// What a task needs; waits for it.
    pub(super) fn take(&mut self, task: Task) -> Result<Tensor> {
        let missing = || ParallelError::ForeignStage { stage: task.stage };
        let (address, _, _) = self.needs(task).ok_or_else(missing)?;
        if let Some(tensor) = self.here.remove(&address) {
            return Ok(tensor);
        }
        let (tensor, work) = self.coming.remove(&address).ok_or_else(missing)?;
        work.wait()?;
        Ok(tensor)
    }

    /// Sends what a task made to the stage that needs it.
    pub(super) fn send(&mut self, task: Task, made: &Tensor) -> Result<()> {
        let (to, way) = match task.work {
            Work::Forward => (task.stage + 1, Way::Forward),
            _ => (task.stage - 1, Way::Backward),
        };
        let address = (to, task.microbatch, way);
        let holder = self.schedule.holders[to];
        if holder == self.group.index() {
            self.here.insert(address, made.shallow_clone());
            return Ok(());
        }
        let made = made.f_contiguous()?;
        let work = self
            .group
            .send(&made, holder, self.tag(address), Purpose::Activation)?;
        self.going.push(work);
        Ok(())
    }

    /// Waits until everything has left.
    pub(super) fn finish(&mut self) -> Result<()> {
        for work in self.going.drain(..) {
            work.wait()?;
        }
        Ok(())
    }

    /// The address of what a task needs, the stage it comes from, and the boundary it crosses.
    fn needs(&self, task: Task) -> Option<(Address, usize, usize)> {
        let last = self.schedule.num_stages() - 1;
        match task.work {
            Work::Forward if task.stage > 0 => {
                let address = (task.stage, task.microbatch, Way::Forward);
                Some((address, task.stage - 1, task.stage - 1))
            }
            work if work.gives_gradient() && task.stage < last => {
                let address = (task.stage, task.microbatch, Way::Backward);
                Some((address, task.stage + 1, task.stage))
            }
            _ => None,
        }
    }

    /// A number for every message of a step, as far as there are numbers; ranks that exchange more
    /// take them in the same order.
    fn tag(&self, (stage, microbatch, way): Address) -> u16 {
        let number = stage * self.schedule.num_microbatches + microbatch;
        ((2 * number + way as usize) % usize::from(u16::MAX)) as u16
    }
}
