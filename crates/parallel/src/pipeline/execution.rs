//! One step of a pipeline, instruction by instruction.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use trainyard_nn::Run;
use trainyard_nn::weight_gradients::WeightGradients;
use trainyard_schedule::{Action, Instruction, Message, Task, Work};
use trainyard_torch::autograd;
use trainyard_trace::SpanKind;

use super::Pipeline;
use super::mail::Mail;
use super::orders::Order;
use crate::error::{ParallelError, Result};
use crate::loss_scale::scaled;
use crate::strategy::{Pass, Step, Strategy, Sync, added};

/// One step under way.
pub(super) struct Execution<'a> {
    pipeline: &'a Pipeline,
    step: &'a Step<'a>,
    mail: Mail<'a>,
    held: HashMap<(usize, usize), Held>,
    owed: HashMap<(usize, usize), WeightGradients>,
    total: Option<Tensor>,
}

/// A micro-batch between its forward and its backward in one stage.
struct Held {
    input: Tensor,
    run: Run,
    seed: Seed,
    weights: WeightGradients,
}

/// What backward begins with.
enum Seed {
    /// On the last stage.
    Loss(Tensor),
    /// Elsewhere a number whose backward gives the output the gradient that is in the slot by then. The
    /// output itself is needed no more.
    Gradient(Tensor, Slot),
}

type Slot = Arc<Mutex<Option<Tensor>>>;

impl<'a> Execution<'a> {
    pub(super) fn new(pipeline: &'a Pipeline, step: &'a Step<'a>) -> Execution<'a> {
        Execution {
            pipeline,
            step,
            mail: Mail::new(&pipeline.schedule, &pipeline.group, &pipeline.shapes),
            held: HashMap::new(),
            owed: HashMap::new(),
            total: None,
        }
    }

    /// Forward and backward, as the program says.
    pub(super) fn train(mut self) -> Result<Option<Tensor>> {
        for order in &self.pipeline.orders {
            self.follow(order)?;
        }
        self.mail.finish()?;
        Ok(self.total)
    }

    /// Forward alone, one micro-batch after the other.
    pub(super) fn evaluate(mut self) -> Result<Option<Tensor>> {
        let schedule = &self.pipeline.schedule;
        for microbatch in 0..self.step.passes.len() {
            for (stage, strategy) in &self.pipeline.stages {
                let task = Task::new(*stage, Work::Forward, microbatch);
                if let Some(message) = schedule.needs(task) {
                    self.mail.expect(message)?;
                }
                let input = self.input(task)?;
                let cx = &self.pass(task)?.cx;
                let run = tch::no_grad(|| strategy.forward(&input, cx))?;
                self.deliver(task, &run.into_output())?;
                if let Some(message) = schedule.gives(task) {
                    // All ranks go forward alone, so the one before it arrives in any case.
                    if let Some(earlier) = microbatch.checked_sub(1) {
                        self.mail.arrived(Message {
                            microbatch: earlier,
                            ..message
                        })?;
                    }
                    self.mail.send(message)?;
                }
            }
        }
        self.mail.finish()?;
        Ok(self.total)
    }

    fn follow(&mut self, order: &Order) -> Result<()> {
        match order.instruction {
            Instruction::Receive(message) => self.mail.expect(message),
            Instruction::Send(message) => self.mail.send(message),
            Instruction::Arrived(message) => self.mail.arrived(message),
            Instruction::Unshard(stage) => self.pipeline.strategy(stage)?.unshard(),
            Instruction::Reshard(stage) => self.pipeline.strategy(stage)?.reshard(),
            Instruction::Reduce(stage) => self.pipeline.strategy(stage)?.start_reduce(order.sync),
            Instruction::Compute(Action::One(task)) => self.compute(task, order.sync),
            Instruction::Compute(Action::Both(forward, backward)) => {
                self.both(forward, backward, order.sync)
            }
        }
    }

    /// One task. What it waits for is waited for before its span begins.
    fn compute(&mut self, task: Task, sync: Sync) -> Result<()> {
        match task.work {
            Work::Forward => {
                let input = self.input(task)?;
                let _span = self.span(SpanKind::Forward, format!("forward {task}"));
                self.forward(task, input)
            }
            Work::Backward | Work::BackwardInput => {
                let held = self.ready(task)?;
                let _span = self.span(SpanKind::Backward, format!("backward {task}"));
                self.backward(task, held, sync, None)
            }
            Work::BackwardWeight => {
                let _span = self.span(SpanKind::Backward, format!("weights {task}"));
                self.weights(task)
            }
        }
    }

    /// Computes what a backward has put off.
    fn weights(&mut self, task: Task) -> Result<()> {
        let Some(weights) = self.owed.remove(&(task.stage, task.microbatch)) else {
            return Ok(());
        };
        self.pipeline.strategy(task.stage)?.expect_weights()?;
        Ok(weights.pay()?)
    }

    /// A forward and a backward beside each other.
    fn both(&mut self, forward: Task, backward: Task, sync: Sync) -> Result<()> {
        let input = self.input(forward)?;
        let held = self.ready(backward)?;
        let action = Action::Both(forward, backward);
        let _span = self.span(SpanKind::Backward, format!("both {action}"));
        self.backward(backward, held, sync, Some((forward, input)))
    }

    fn span(&self, kind: SpanKind, name: String) -> trainyard_trace::SpanGuard<'a> {
        self.step.ledger.enter(kind, name)
    }

    fn pass(&self, task: Task) -> Result<&'a Pass<'a>> {
        let passes = &self.step.passes;
        passes
            .get(task.microbatch)
            .ok_or(ParallelError::Microbatches {
                expected: self.pipeline.schedule.num_microbatches,
                given: passes.len(),
            })
    }

    /// What a stage computes with; waits for it.
    fn input(&mut self, task: Task) -> Result<Tensor> {
        match task.stage {
            0 => Ok(self.pass(task)?.inputs.shallow_clone()),
            stage => self.mail.take(stage - 1, stage, task.microbatch),
        }
    }

    /// What a backward begins with; waits for it.
    fn ready(&mut self, task: Task) -> Result<Held> {
        let held = self.held.remove(&(task.stage, task.microbatch));
        let held = held.ok_or(ParallelError::ForeignStage { stage: task.stage })?;
        if let Seed::Gradient(_, slot) = &held.seed {
            let gradient = self
                .mail
                .take(task.stage + 1, task.stage, task.microbatch)?;
            put(slot, gradient);
        }
        Ok(held)
    }

    /// Hands a stage's output on; the last stage's becomes a loss.
    fn deliver(&mut self, task: Task, output: &Tensor) -> Result<Seed> {
        if task.stage < self.pipeline.last_stage() {
            let made = output.f_detach()?;
            self.mail
                .put(task.stage, task.stage + 1, task.microbatch, made);
            return carrying(output);
        }
        let strategy = self.pipeline.strategy(task.stage)?;
        let loss = strategy.loss(output, self.pass(task)?.targets)?;
        let loss = loss.f_div_scalar(self.step.count)?;
        self.total = Some(added(self.total.take(), loss.f_detach()?)?);
        Ok(Seed::Loss(loss))
    }

    fn forward(&mut self, task: Task, mut input: Tensor) -> Result<()> {
        if task.stage > 0 {
            input = input.f_set_requires_grad(true)?;
        }
        let (strategy, pass) = (self.pipeline.strategy(task.stage)?, self.pass(task)?);
        let weights = WeightGradients::default();
        let mut run = weights.during(|| strategy.forward(&input, &pass.cx))?;
        let seed = self.deliver(task, run.output())?;
        run.release_output();
        let held = Held {
            input,
            run,
            seed,
            weights,
        };
        self.held.insert((task.stage, task.microbatch), held);
        Ok(())
    }

    /// Backward, and the forward that is to run beside it.
    fn backward(
        &mut self,
        task: Task,
        held: Held,
        sync: Sync,
        beside: Option<(Task, Tensor)>,
    ) -> Result<()> {
        let Held {
            input,
            run,
            seed,
            weights,
        } = held;
        let seed = match seed {
            Seed::Loss(loss) => scaled(&loss, self.step.scale)?,
            Seed::Gradient(number, _) => number,
        };
        let pipeline = self.pipeline;
        let strategy = pipeline.strategy(task.stage)?;
        let is_unwatched = sync == Sync::Keep || !strategy.watches_gradients();
        match task.work {
            Work::BackwardInput => weights.put_off(),
            _ if is_unwatched => weights.add_in_place(),
            _ => {}
        }
        match beside {
            None => strategy.start_backward(run, &seed, sync)?,
            Some((forward, x)) => {
                let mut other = || self.forward(forward, x.shallow_clone());
                strategy.start_backward_beside(run, &seed, sync, &mut other)?;
            }
        }
        if task.work == Work::BackwardInput {
            pipeline.tell(strategy, weights.num_owed());
            self.owed.insert((task.stage, task.microbatch), weights);
        }
        if let Some(before) = task.stage.checked_sub(1) {
            let gradient = input.f_grad()?;
            self.mail.put(task.stage, before, task.microbatch, gradient);
        }
        Ok(())
    }
}

impl Pipeline {
    /// Says once what is put off and what is not.
    fn tell(&self, stage: &dyn Strategy, num_owed: usize) {
        if !self.has_told.replace(true) {
            let num_parameters = stage.parameters().len();
            tracing::info!(
                "the gradients of {num_owed} of a stage's {num_parameters} parameters are put off, as \
                 the schedule says; layers that cannot put theirs off compute them at once"
            );
        }
    }
}

/// What a stage has in place of a loss.
fn carrying(output: &Tensor) -> Result<Seed> {
    if !output.requires_grad() {
        return Ok(Seed::Gradient(output.f_detach()?, Slot::default()));
    }
    let slot = Slot::default();
    let later = Arc::clone(&slot);
    let number = autograd::single(
        &[output],
        |_, inputs| {
            let none = inputs[0].f_view(-1i64)?.f_narrow(0, 0, 0)?;
            Ok(none.f_sum(Kind::Float)?)
        },
        move |_, _| Ok(vec![taken(&later)]),
    )?;
    Ok(Seed::Gradient(number, slot))
}

/// Nothing can fail while a slot is locked.
fn put(slot: &Slot, gradient: Tensor) {
    let mut slot = slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    *slot = Some(gradient);
}

fn taken(slot: &Slot) -> Option<Tensor> {
    let mut slot = slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    slot.take()
}
