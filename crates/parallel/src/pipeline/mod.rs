//! Pipeline parallelism: ranks that share a model's layers, each working on another micro-batch.
//!
//! A schedule (`trainyard-schedule`) says what each rank does in which order; here it is done. A stage
//! is a part of the model in whatever strategy reduces its gradients. Activations go to the rank of the
//! next stage and their gradients back; messages wait for nobody, and what a rank will need is asked
//! for before it computes what comes first. Where the schedule takes the parts of backward apart, the
//! gradients of weights are put off inside the layers (`trainyard_nn::deferred`).

mod mail;
mod part;
mod split;
mod tie;

use std::cell::RefCell;
use std::collections::HashMap;

use tch::{Kind, Tensor};
use trainyard_nn::deferred::{self, Debts};
use trainyard_nn::{Context, Model, Module, Parameter, Run, Unit};
use trainyard_schedule::{Action, Schedule, Task, Work};
use trainyard_torch::{Group, autograd};
use trainyard_trace::SpanKind;

use crate::error::{ParallelError, Result};
use crate::strategy::{Pass, Step, Strategy, Sync, Update, added, scaled};
use crate::volume::{StateBytes, Volume};
use mail::Mail;

pub use mail::Shape;
pub use part::Part;
pub use split::balanced;
pub use tie::Tie;

/// A model whose stages are spread over the ranks of `pp`.
pub struct Pipeline {
    schedule: Schedule,
    /// This rank's stages, by number.
    stages: Vec<(usize, Box<dyn Strategy>)>,
    group: Group,
    /// What each stage but the last gives to the next.
    shapes: Vec<Shape>,
    /// A table that another rank computes with too.
    tie: Option<Tie>,
    /// Whether gradients of weights are put off where the schedule says so.
    defers: bool,
    /// The task with which the gradients of each of this rank's stages are complete.
    completing: HashMap<usize, Task>,
}

impl Pipeline {
    /// `stages` are this rank's, in the schedule's order; `shapes` what stages give to the next ones.
    pub fn new(
        schedule: Schedule,
        stages: Vec<Box<dyn Strategy>>,
        group: &Group,
        shapes: Vec<Shape>,
    ) -> Result<Pipeline> {
        let own = schedule.stages_of(group.index());
        let num_boundaries = schedule.num_stages().saturating_sub(1);
        if schedule.num_ranks() != group.size()
            || own.len() != stages.len()
            || shapes.len() != num_boundaries
        {
            return Err(ParallelError::StagesMisfit {
                num_ranks: schedule.num_ranks(),
                group_size: group.size(),
                num_stages: own.len(),
                given: stages.len(),
            });
        }
        let splits = schedule
            .tasks()
            .any(|(_, t)| t.work == Work::BackwardWeight);
        let defers = splits && stages.iter().all(|stage| stage.can_defer());
        if splits && !defers && group.index() == 0 {
            tracing::info!(
                "sharded states are reduced with each backward, so this schedule computes gradients of \
                 weights together with those of inputs"
            );
        }
        let tasks = schedule.tasks().filter(|(rank, _)| *rank == group.index());
        let completes = |task: &Task| match defers {
            true => task.work.releases(),
            false => task.work.gives_gradient(),
        };
        let last = tasks.map(|(_, task)| task).filter(completes);
        Ok(Pipeline {
            completing: last.map(|task| (task.stage, task)).collect(),
            defers,
            tie: None,
            stages: own.into_iter().zip(stages).collect(),
            group: group.clone(),
            schedule,
            shapes,
        })
    }

    /// The same with a table that the first stage and the last share.
    #[must_use]
    pub fn tied(mut self, tie: Option<Tie>) -> Pipeline {
        self.tie = tie;
        self
    }

    /// The schedule it follows.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    fn last_stage(&self) -> usize {
        self.schedule.num_stages() - 1
    }

    fn strategy(&self, stage: usize) -> Result<&dyn Strategy> {
        let found = self.stages.iter().find(|(number, _)| *number == stage);
        let (_, strategy) = found.ok_or(ParallelError::ForeignStage { stage })?;
        Ok(&**strategy)
    }

    /// Every task of this rank, in order.
    fn tasks(&self) -> Vec<Task> {
        let actions = &self.schedule.ranks[self.group.index()];
        actions.iter().flat_map(Action::tasks).collect()
    }

    /// Whether a stage's gradients are complete with this task.
    fn sync(&self, task: Task) -> Sync {
        match self.completing.get(&task.stage) == Some(&task) {
            true => Sync::Reduce,
            false => Sync::Accumulate,
        }
    }
}

/// A micro-batch between its forward and its backward in one stage.
struct Held {
    input: Tensor,
    run: Run,
    /// On the last stage.
    loss: Option<Tensor>,
}

/// One step under way.
struct Execution<'a> {
    pipeline: &'a Pipeline,
    step: &'a Step<'a>,
    mail: RefCell<Mail<'a>>,
    held: RefCell<HashMap<(usize, usize), Held>>,
    owed: RefCell<HashMap<(usize, usize), Debts>>,
    total: RefCell<Option<Tensor>>,
}

impl Execution<'_> {
    fn run(&self) -> Result<()> {
        let tasks = self.pipeline.tasks();
        for (number, &task) in tasks.iter().enumerate() {
            // What comes next is asked for now, so that it travels while this is computed.
            self.mail.borrow_mut().expect(task)?;
            if let Some(&next) = tasks.get(number + 1) {
                self.mail.borrow_mut().expect(next)?;
            }
            match task.work {
                Work::Forward => self.forward(task)?,
                Work::Backward | Work::BackwardInput => self.backward(task)?,
                Work::BackwardWeight => self.backward_weight(task)?,
            }
        }
        self.mail.borrow_mut().finish()
    }

    fn pass(&self, task: Task) -> Result<&Pass<'_>> {
        let passes = &self.step.passes;
        passes
            .get(task.microbatch)
            .ok_or(ParallelError::Microbatches {
                expected: self.pipeline.schedule.num_microbatches,
                given: passes.len(),
            })
    }

    fn forward(&self, task: Task) -> Result<()> {
        let _span = self
            .step
            .ledger
            .enter(SpanKind::Forward, format!("forward {task}"));
        let pass = self.pass(task)?;
        let input = match task.stage {
            0 => pass.inputs.shallow_clone(),
            _ => self
                .mail
                .borrow_mut()
                .take(task)?
                .f_set_requires_grad(true)?,
        };
        let strategy = self.pipeline.strategy(task.stage)?;
        let run = match self.pipeline.defers {
            true => deferred::allowing(|| strategy.forward(&input, &pass.cx))?,
            false => strategy.forward(&input, &pass.cx)?,
        };
        let mut loss = None;
        if task.stage == self.pipeline.last_stage() {
            let sum = strategy.loss(run.output(), pass.targets)?;
            let divided = sum.f_div_scalar(self.step.count)?;
            self.add(&divided.f_detach()?)?;
            loss = Some(divided);
        } else {
            self.mail
                .borrow_mut()
                .send(task, &run.output().f_detach()?)?;
        }
        let held = Held { input, run, loss };
        self.held
            .borrow_mut()
            .insert((task.stage, task.microbatch), held);
        Ok(())
    }

    fn backward(&self, task: Task) -> Result<()> {
        let _span = self
            .step
            .ledger
            .enter(SpanKind::Backward, format!("backward {task}"));
        let held = self
            .held
            .borrow_mut()
            .remove(&(task.stage, task.microbatch));
        let Held { input, run, loss } =
            held.ok_or(ParallelError::ForeignStage { stage: task.stage })?;
        let seed = match loss {
            Some(loss) => scaled(&loss, self.step.scale)?,
            None => carrying(run.output(), self.mail.borrow_mut().take(task)?)?,
        };
        let strategy = self.pipeline.strategy(task.stage)?;
        let backward = || strategy.backward(run, &seed, self.pipeline.sync(task));
        if self.pipeline.defers && task.work == Work::BackwardInput {
            let (passed, debts) = deferred::deferring(backward);
            passed?;
            self.owed
                .borrow_mut()
                .insert((task.stage, task.microbatch), debts);
        } else {
            backward()?;
        }
        if task.stage > 0 {
            self.mail.borrow_mut().send(task, &input.f_grad()?)?;
        }
        Ok(())
    }

    /// Computes what was put off, if it was; then the stage's gradients may be complete.
    fn backward_weight(&self, task: Task) -> Result<()> {
        let debts = self
            .owed
            .borrow_mut()
            .remove(&(task.stage, task.microbatch));
        let Some(debts) = debts else {
            return Ok(());
        };
        let _span = self
            .step
            .ledger
            .enter(SpanKind::Backward, format!("weights {task}"));
        debts.pay()?;
        match self.pipeline.sync(task) {
            Sync::Reduce => self.pipeline.strategy(task.stage)?.reduce(),
            Sync::Accumulate => Ok(()),
        }
    }

    fn add(&self, loss: &Tensor) -> Result<()> {
        let mut total = self.total.borrow_mut();
        *total = Some(added(total.take(), loss.shallow_clone())?);
        Ok(())
    }
}

/// A number whose backward gives `output` this gradient: what a stage has in place of a loss.
fn carrying(output: &Tensor, gradient: Tensor) -> Result<Tensor> {
    let mut outputs = autograd::function(
        &[output],
        |_, inputs| {
            let none = inputs[0].f_view(-1i64)?.f_narrow(0, 0, 0)?;
            Ok(vec![none.f_sum(Kind::Float)?])
        },
        move |_, _| Ok(vec![Some(gradient.shallow_clone())]),
    )?;
    Ok(outputs.swap_remove(0))
}

impl Strategy for Pipeline {
    fn forward(&self, _: &Tensor, _: &Context) -> Result<Run> {
        Err(ParallelError::WholeStepsOnly)
    }

    fn backward(&self, _: Run, _: &Tensor, _: Sync) -> Result<Vec<String>> {
        Err(ParallelError::WholeStepsOnly)
    }

    fn run_step(&self, step: &Step<'_>) -> Result<Option<Tensor>> {
        let execution = Execution {
            pipeline: self,
            step,
            mail: RefCell::new(Mail::new(&self.schedule, &self.group, &self.shapes)),
            held: RefCell::default(),
            owed: RefCell::default(),
            total: RefCell::default(),
        };
        execution.run()?;
        if let Some(tie) = &self.tie {
            tie.add_up(&self.group)?;
        }
        Ok(execution.total.into_inner())
    }

    fn evaluate(&self, step: &Step<'_>) -> Result<Option<Tensor>> {
        let mut mail = Mail::new(&self.schedule, &self.group, &self.shapes);
        let mut total: Option<Tensor> = None;
        for (microbatch, pass) in step.passes.iter().enumerate() {
            for (stage, strategy) in &self.stages {
                let task = Task::new(*stage, Work::Forward, microbatch);
                mail.expect(task)?;
                let input = match stage {
                    0 => pass.inputs.shallow_clone(),
                    _ => mail.take(task)?,
                };
                let output = tch::no_grad(|| strategy.forward(&input, &pass.cx))?.into_output();
                if *stage < self.last_stage() {
                    mail.send(task, &output)?;
                    continue;
                }
                let loss = strategy
                    .loss(&output, pass.targets)?
                    .f_div_scalar(step.count)?;
                total = Some(added(total, loss)?);
            }
        }
        mail.finish()?;
        Ok(total)
    }

    fn zero_grad(&self) -> Result<()> {
        self.stages.iter().try_for_each(|(_, s)| s.zero_grad())
    }

    fn update(&self, update: &mut dyn Update) -> Result<()> {
        // Strategies that update by parts would each step everything.
        match &self.stages[..] {
            [(_, only)] => only.update(update),
            _ => update.step(),
        }
    }

    fn copies(&self) -> Vec<Parameter> {
        let copy = self.tie.as_ref().and_then(Tie::copy);
        copy.into_iter().cloned().collect()
    }

    fn settle(&self) -> Result<()> {
        self.stages.iter().try_for_each(|(_, s)| s.settle())
    }

    fn with_parameters(&self, visitor: &mut dyn FnMut(&Parameter) -> Result<()>) -> Result<()> {
        let mut stages = self.stages.iter();
        stages.try_for_each(|(_, stage)| stage.with_parameters(visitor))
    }

    fn volume(&self, num_microbatches: usize, world_size: usize) -> Volume {
        let of_stage = |(_, stage): &(usize, Box<dyn Strategy>)| {
            stage.volume(num_microbatches, world_size / self.group.size())
        };
        let mut volume: Volume = self.stages.iter().map(of_stage).sum();
        if let Some(tie) = &self.tie {
            // Told once for all ranks, by those of the stage that owns the table.
            let num_ties = (world_size / self.group.size()) as u64;
            let sent = if tie.copy().is_none() { tie.sent() } else { 0 };
            volume.gradients += num_ties * sent;
            volume.reduced += tie.sent();
        }
        volume
    }

    fn states(&self, num_moments: u64) -> StateBytes {
        self.stages.iter().map(|(_, s)| s.states(num_moments)).sum()
    }
}

impl Module for Pipeline {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        for (_, stage) in &self.stages {
            stage.visit(visitor);
        }
    }
}

impl Model for Pipeline {
    fn units(&self) -> Vec<&dyn Unit> {
        self.stages.iter().flat_map(|(_, s)| s.units()).collect()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> trainyard_nn::Result<Tensor> {
        match self.stages.last() {
            Some((_, stage)) => stage.loss(output, targets),
            None => Err(trainyard_nn::NnError::strategy(
                ParallelError::WholeStepsOnly,
            )),
        }
    }

    fn sent_by_layers(&self, num_tokens: u64) -> u64 {
        let layers = self.stages.first();
        let within = layers.map_or(0, |(_, s)| s.sent_by_layers(num_tokens));
        let pairs = self.schedule.holders.windows(2).zip(&self.shapes);
        let between = pairs.filter(|(pair, _)| pair[0] != pair[1]);
        // Activations forward, their gradients back.
        within
            + between
                .map(|(_, shape)| 2 * shape.sent(num_tokens))
                .sum::<u64>()
    }
}
