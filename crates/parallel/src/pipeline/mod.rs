//! Pipeline parallelism: ranks that share a model's layers, each working on another micro-batch.
//!
//! A schedule (`trainyard-schedule`) says what each rank does in which order; here it is done. A stage
//! is a part of the model in whatever strategy reduces its gradients. Activations go to the rank of the
//! next stage and their gradients back; messages wait for nobody, and what a rank will need is asked
//! for before it computes what comes first. Where the schedule takes the parts of backward apart, the
//! gradients of weights are put off inside the layers (`trainyard_nn::weight_gradients`); where it pairs a
//! forward with a backward, each computes while the other communicates (`trainyard_torch::beside`).

mod execution;
mod mail;
mod orders;
mod part;
mod split;
mod tie;

use std::cell::Cell;

use tch::Tensor;
use trainyard_nn::{Context, Model, Module, Parameter, Run, Unit};
use trainyard_schedule::{Instruction, Schedule, Sharing};
use trainyard_torch::Group;

use crate::error::{ParallelError, Result};
use crate::strategy::{Passes, Step, Strategy, Sync, Update};
use crate::volume::{StateBytes, Volume};
use execution::Execution;
use orders::Order;

pub use mail::Shape;
pub use part::Part;
pub use split::balanced;
pub use tie::Tie;

/// A model whose stages are spread over the ranks of `pp`.
pub struct Pipeline {
    schedule: Schedule,
    /// What this rank does in a step.
    orders: Vec<Order>,
    /// This rank's stages, by number.
    stages: Vec<(usize, Box<dyn Strategy>)>,
    group: Group,
    sharing: Sharing,
    /// What each stage but the last gives to the next.
    shapes: Vec<Shape>,
    /// A table that another rank computes with too.
    tie: Option<Tie>,
    /// Whether the log knows what is put off.
    has_told: Cell<bool>,
}

impl Pipeline {
    /// `stages` are this rank's, in the schedule's order; `shapes` what stages give to the next ones.
    pub fn new(
        schedule: Schedule,
        stages: Vec<Box<dyn Strategy>>,
        group: &Group,
        shapes: Vec<Shape>,
        sharing: Sharing,
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
        let mut program = schedule.program(sharing);
        let instructions = program.ranks.swap_remove(group.index());
        Ok(Pipeline {
            orders: orders::orders(instructions),
            has_told: Cell::new(false),
            tie: None,
            stages: own.into_iter().zip(stages).collect(),
            group: group.clone(),
            sharing,
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

    /// How often a stage does what costs messages.
    fn passes(&self, stage: usize) -> Passes {
        let count = |wanted: Instruction| {
            let orders = self.orders.iter();
            orders.filter(|order| order.does(wanted)).count() as u64
        };
        let num_gathers = count(Instruction::Unshard(stage));
        Passes {
            num_microbatches: self.schedule.num_microbatches as u64,
            num_reductions: count(Instruction::Reduce(stage)),
            num_gathers: self.sharing.most_unsharded.map(|_| num_gathers),
        }
    }

    /// Lets each stage update with no other's gradients about.
    fn update_by_stage(&self, update: &mut dyn Update) -> Result<()> {
        let mut set_aside = Vec::new();
        for (_, stage) in &self.stages {
            let mut gradients = Vec::new();
            for parameter in stage.parameters() {
                gradients.push((parameter.clone(), parameter.gradient()?));
                parameter.set_gradient(None);
            }
            set_aside.push(gradients);
        }
        for ((_, stage), gradients) in self.stages.iter().zip(set_aside) {
            for (parameter, gradient) in &gradients {
                let gradient = gradient.as_ref().map(Tensor::shallow_clone);
                parameter.set_gradient(gradient);
            }
            stage.update(update)?;
            for (parameter, _) in &gradients {
                parameter.set_gradient(None);
            }
        }
        Ok(())
    }
}

impl Strategy for Pipeline {
    fn forward(&self, _: &Tensor, _: &Context) -> Result<Run> {
        Err(ParallelError::WholeStepsOnly)
    }

    fn start_backward(&self, _: Run, _: &Tensor, _: Sync) -> Result<()> {
        Err(ParallelError::WholeStepsOnly)
    }

    fn start_reduce(&self, _: Sync) -> Result<()> {
        Err(ParallelError::WholeStepsOnly)
    }

    fn finish_reduce(&self) -> Result<Vec<String>> {
        let mut unused = Vec::new();
        for (_, stage) in &self.stages {
            unused.extend(stage.finish_reduce()?);
        }
        Ok(unused)
    }

    fn run_step(&self, step: &Step<'_>) -> Result<Option<Tensor>> {
        let total = Execution::new(self, step).train()?;
        self.finish_reduce()?;
        if let Some(tie) = &self.tie {
            tie.add_up(&self.group)?;
        }
        Ok(total)
    }

    fn evaluate(&self, step: &Step<'_>) -> Result<Option<Tensor>> {
        Execution::new(self, step).evaluate()
    }

    fn zero_grad(&self) -> Result<()> {
        self.stages.iter().try_for_each(|(_, s)| s.zero_grad())
    }

    fn update(&self, update: &mut dyn Update) -> Result<()> {
        match &self.stages[..] {
            [(_, only)] => only.update(update),
            several if several.iter().any(|(_, s)| s.updates_by_parts()) => {
                self.update_by_stage(update)
            }
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

    fn volume(&self, _: Passes, world_size: usize) -> Volume {
        let of_stage = |(number, stage): &(usize, Box<dyn Strategy>)| {
            stage.volume(self.passes(*number), world_size / self.group.size())
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
