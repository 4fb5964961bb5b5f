//! Execution of one pipeline step, instruction by instruction.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use trainyard_nn::Run;
use trainyard_nn::weight_gradients::WeightGradients;
use trainyard_schedule::{Action, ComputeType, Instruction, Message, Task};
use trainyard_torch::autograd;
use trainyard_trace::SpanKind;

use super::Pipeline;
use super::planned_instruction::PlannedInstruction;
use super::stage_comm::StageComm;
use crate::error::{ParallelError, Result};
use crate::loss_scale::backward_loss;
use crate::strategy::{DataParallelWrapper, GradSync, Microbatch, StepInputs, accumulated};

/// One step in progress.
pub(super) struct Execution<'a> {
    pipeline: &'a Pipeline,
    step: &'a StepInputs<'a>,
    comm: StageComm<'a>,
    /// In-flight micro-batches by stage and index.
    in_flight: HashMap<(usize, usize), InFlight>,
    deferred_weight_grads: HashMap<(usize, usize), WeightGradients>,
    total: Option<Tensor>,
}

/// A micro-batch between its forward and its backward in one stage.
struct InFlight {
    input: Tensor,
    run: Run,
    seed: Seed,
    weights: WeightGradients,
}

/// The scalar from which backward starts.
enum Seed {
    /// The loss, on the last stage.
    Loss(Tensor),
    /// On other stages, a scalar whose backward passes the gradient in the slot on to the stage's output. The
    /// output itself can be released.
    Gradient(Tensor, Slot),
}

type Slot = Arc<Mutex<Option<Tensor>>>;

impl<'a> Execution<'a> {
    pub(super) fn new(pipeline: &'a Pipeline, step: &'a StepInputs<'a>) -> Execution<'a> {
        Execution {
            pipeline,
            step,
            comm: StageComm::new(&pipeline.schedule, &pipeline.group, &pipeline.activations),
            in_flight: HashMap::new(),
            deferred_weight_grads: HashMap::new(),
            total: None,
        }
    }

    /// Runs forward and backward of all micro-batches, in the order of the program.
    pub(super) fn train(mut self) -> Result<Option<Tensor>> {
        for planned in &self.pipeline.plan {
            self.execute(planned)?;
        }
        self.comm.finish()?;
        Ok(self.total)
    }

    /// Runs forward without gradients and computes the loss.
    pub(super) fn evaluate(mut self) -> Result<Option<Tensor>> {
        self.run_forward(|this, task, output| this.hand_on(task, output).map(drop))?;
        Ok(self.total)
    }

    /// Runs forward without gradients. Returns the output of every micro-batch on the rank of the last stage, and none on others.
    pub(super) fn predict(mut self) -> Result<Vec<Tensor>> {
        let last = self.pipeline.last_stage();
        let mut outputs = Vec::new();
        self.run_forward(|this, task, output| {
            if task.stage == last {
                outputs.push(output.shallow_clone());
                return Ok(());
            }
            this.hand_on(task, output).map(drop)
        })?;
        Ok(outputs)
    }

    /// Runs forward only, one micro-batch after the other, and calls `finish` with the output of each stage.
    fn run_forward(
        &mut self,
        mut finish: impl FnMut(&mut Self, Task, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let schedule = &self.pipeline.schedule;
        for microbatch in 0..self.step.microbatches.len() {
            for (stage, strategy) in &self.pipeline.stages {
                let task = Task::new(*stage, ComputeType::Forward, microbatch);
                if let Some(message) = schedule.recv_for(task) {
                    self.comm.post_recv(message)?;
                }
                let input = self.input(task)?;
                let cx = &self.microbatch(task)?.cx;
                let run = tch::no_grad(|| strategy.forward(&input, cx))?;
                finish(self, task, &run.into_output())?;
                if let Some(message) = schedule.send_for(task) {
                    // All ranks only run forward, so the previous message is received in any case.
                    if let Some(earlier) = microbatch.checked_sub(1) {
                        self.comm.wait_send(Message {
                            microbatch: earlier,
                            ..message
                        })?;
                    }
                    self.comm.send(message)?;
                }
            }
        }
        self.comm.finish()
    }

    fn execute(&mut self, planned: &PlannedInstruction) -> Result<()> {
        match planned.instruction {
            Instruction::Receive(message) => self.comm.post_recv(message),
            Instruction::Send(message) => self.comm.send(message),
            Instruction::WaitSend(message) => self.comm.wait_send(message),
            Instruction::Unshard(stage) => self.pipeline.strategy(stage)?.unshard(),
            Instruction::Reshard(stage) => self.pipeline.strategy(stage)?.reshard(),
            Instruction::Reduce(stage) => self.pipeline.strategy(stage)?.start_reduce(planned.sync),
            Instruction::Compute(Action::Single(task)) => self.compute(task, planned.sync),
            Instruction::Compute(Action::Overlapped(forward, backward)) => {
                self.compute_overlapped(forward, backward, planned.sync)
            }
        }
    }

    /// Runs one task. It waits for the inputs before the span begins, so that spans do not include idle time.
    fn compute(&mut self, task: Task, sync: GradSync) -> Result<()> {
        match task.compute_type {
            ComputeType::Forward => {
                let input = self.input(task)?;
                let _span = self.span(SpanKind::Forward, format!("forward {task}"));
                self.forward(task, input)
            }
            ComputeType::Backward | ComputeType::BackwardInput => {
                let in_flight = self.take_in_flight(task)?;
                let _span = self.span(SpanKind::Backward, format!("backward {task}"));
                self.backward(task, in_flight, sync, None)
            }
            ComputeType::BackwardWeight => {
                let _span = self.span(SpanKind::Backward, format!("backward_weight {task}"));
                self.backward_weight(task)
            }
        }
    }

    /// Computes the weight gradients that a backward has deferred.
    fn backward_weight(&mut self, task: Task) -> Result<()> {
        let deferred = self
            .deferred_weight_grads
            .remove(&(task.stage, task.microbatch));
        let Some(weights) = deferred else {
            return Ok(());
        };
        self.pipeline.strategy(task.stage)?.begin_weight_grads()?;
        Ok(weights.compute()?)
    }

    /// Runs a forward and a backward interleaved.
    fn compute_overlapped(&mut self, forward: Task, backward: Task, sync: GradSync) -> Result<()> {
        let input = self.input(forward)?;
        let in_flight = self.take_in_flight(backward)?;
        let action = Action::Overlapped(forward, backward);
        let _span = self.span(SpanKind::Backward, format!("overlap {action}"));
        self.backward(backward, in_flight, sync, Some((forward, input)))
    }

    fn span(&self, kind: SpanKind, name: String) -> trainyard_trace::SpanGuard<'a> {
        self.step.ledger.enter(kind, name)
    }

    fn microbatch(&self, task: Task) -> Result<&'a Microbatch<'a>> {
        let microbatches = &self.step.microbatches;
        microbatches
            .get(task.microbatch)
            .ok_or(ParallelError::Microbatches {
                expected: self.pipeline.schedule.num_microbatches,
                given: microbatches.len(),
            })
    }

    /// Waits for the input of a forward.
    fn input(&mut self, task: Task) -> Result<Tensor> {
        match task.stage {
            0 => Ok(self.microbatch(task)?.inputs.shallow_clone()),
            stage => self.comm.wait_input(stage - 1, stage, task.microbatch),
        }
    }

    /// Takes the micro-batch of a backward, and waits for the gradient of its output.
    fn take_in_flight(&mut self, task: Task) -> Result<InFlight> {
        let in_flight = self.in_flight.remove(&(task.stage, task.microbatch));
        let in_flight = in_flight.ok_or(ParallelError::UnexpectedTask { stage: task.stage })?;
        if let Seed::Gradient(_, slot) = &in_flight.seed {
            let gradient = self
                .comm
                .wait_input(task.stage + 1, task.stage, task.microbatch)?;
            put(slot, gradient);
        }
        Ok(in_flight)
    }

    /// Stores a stage's output for the next stage; the last stage computes the loss from it.
    fn hand_on(&mut self, task: Task, output: &Tensor) -> Result<Seed> {
        if task.stage < self.pipeline.last_stage() {
            let detached = output.f_detach()?;
            self.comm
                .put_output(task.stage, task.stage + 1, task.microbatch, detached);
            return backward_seed(output);
        }
        let strategy = self.pipeline.strategy(task.stage)?;
        let loss = strategy.loss(output, self.microbatch(task)?.targets)?;
        let loss = loss.f_div_scalar(self.step.count)?;
        self.total = Some(accumulated(self.total.take(), loss.f_detach()?)?);
        Ok(Seed::Loss(loss))
    }

    fn forward(&mut self, task: Task, mut input: Tensor) -> Result<()> {
        if task.stage > 0 {
            input = input.f_set_requires_grad(true)?;
        }
        let (strategy, microbatch) = (self.pipeline.strategy(task.stage)?, self.microbatch(task)?);
        let weights = WeightGradients::default();
        let mut run = weights.record(|| strategy.forward(&input, &microbatch.cx))?;
        let seed = self.hand_on(task, run.output())?;
        run.release_output();
        let in_flight = InFlight {
            input,
            run,
            seed,
            weights,
        };
        self.in_flight
            .insert((task.stage, task.microbatch), in_flight);
        Ok(())
    }

    /// Runs a backward, interleaved with a forward if one is given.
    fn backward(
        &mut self,
        task: Task,
        in_flight: InFlight,
        sync: GradSync,
        overlapped: Option<(Task, Tensor)>,
    ) -> Result<()> {
        let InFlight {
            input,
            run,
            seed,
            weights,
        } = in_flight;
        let seed = match seed {
            Seed::Loss(loss) => backward_loss(&loss, self.step.scale, self.step.is_guarded)?,
            Seed::Gradient(scalar, _) => scalar,
        };
        let pipeline = self.pipeline;
        let strategy = pipeline.strategy(task.stage)?;
        let may_skip_hooks = sync == GradSync::None || !strategy.needs_grad_hooks();
        match task.compute_type {
            ComputeType::BackwardInput => weights.defer(),
            _ if may_skip_hooks => weights.add_in_place(),
            _ => {}
        }
        match overlapped {
            None => strategy.start_backward(run, &seed, sync)?,
            Some((forward, x)) => {
                let mut other = || self.forward(forward, x.shallow_clone());
                strategy.start_backward_interleaved(run, &seed, sync, &mut other)?;
            }
        }
        if task.compute_type == ComputeType::BackwardInput {
            pipeline.log_deferred_once(strategy, weights.num_deferred());
            self.deferred_weight_grads
                .insert((task.stage, task.microbatch), weights);
        }
        if let Some(previous) = task.stage.checked_sub(1) {
            let gradient = input.f_grad()?;
            self.comm
                .put_output(task.stage, previous, task.microbatch, gradient);
        }
        Ok(())
    }
}

impl Pipeline {
    /// Logs, the first time, for how many parameters weight gradients are deferred.
    fn log_deferred_once(&self, stage: &dyn DataParallelWrapper, num_deferred: usize) {
        if !self.has_logged.replace(true) {
            let num_parameters = stage.parameters().len();
            tracing::info!(
                "the schedule defers weight gradients: those of {num_deferred} of a stage's {num_parameters} \
                 parameters; layers that do not support this compute theirs at once"
            );
        }
    }
}

/// The seed of a stage that has no loss.
fn backward_seed(output: &Tensor) -> Result<Seed> {
    if !output.requires_grad() {
        return Ok(Seed::Gradient(output.f_detach()?, Slot::default()));
    }
    let slot = Slot::default();
    let later = Arc::clone(&slot);
    let scalar = autograd::apply(
        &[output],
        |_, inputs| {
            let none = inputs[0].f_narrow(0, 0, 0)?.f_reshape(-1i64)?;
            Ok(none.f_sum(Kind::Float)?)
        },
        move |_, _| Ok(vec![take(&later)]),
    )?;
    Ok(Seed::Gradient(scalar, slot))
}

/// No code can panic while a slot is locked, so poisoning is ignored.
fn put(slot: &Slot, gradient: Tensor) {
    let mut slot = slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    *slot = Some(gradient);
}

fn take(slot: &Slot) -> Option<Tensor> {
    let mut slot = slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    slot.take()
}
