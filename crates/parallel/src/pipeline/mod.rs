//! Pipeline parallelism: each rank holds some layers, and all ranks work on different micro-batches.
//!
//! A schedule (`trainyard-schedule`) orders the actions of each rank; this module executes them. A stage is a
//! part of the model, wrapped in the strategy that reduces its gradients. A rank sends activations to the rank of
//! the next stage and their gradients back. Sends do not block, and receives are posted one action ahead. If the
//! schedule splits backward, layers defer their weight gradients (`trainyard_nn::weight_gradients`); if it pairs a
//! forward with a backward, one computes while the other communicates (`trainyard_torch::interleave`).

mod execution;
mod planned_instruction;
mod stage_comm;
mod stage_model;
mod tied_embedding;
mod wrap;

use std::cell::Cell;
use std::collections::BTreeSet;

use tch::Tensor;
use trainyard_cost::{CommCounts, CostModel, StateBytes, Volume};
use trainyard_nn::{Model, Module, Parameter, Unit};
use trainyard_optim::Optimizer;
use trainyard_schedule::{Instruction, Schedule, ShardingPolicy};
use trainyard_torch::Group;

use crate::error::{ParallelError, Result};
use crate::offload::Counters;
use crate::param_state::ParamState;
use crate::strategy::{
    DataParallelWrapper, OptimizerStep, StateLoader, StateVisitor, StepInputs, Strategy,
};
use execution::Execution;
use planned_instruction::PlannedInstruction;

pub use stage_comm::ActivationSpec;
pub use stage_model::StageModel;
pub use tied_embedding::TiedEmbedding;
pub use wrap::{Cut, PipelineOptions, pipeline};

/// A model whose stages are spread over the ranks of `pp`.
pub struct Pipeline {
    schedule: Schedule,
    /// The instructions of this rank for one step.
    plan: Vec<PlannedInstruction>,
    /// This rank's stages with their indices.
    stages: Vec<(usize, Box<dyn DataParallelWrapper>)>,
    group: Group,
    policy: ShardingPolicy,
    /// The activations that each stage but the last sends to the next.
    activations: Vec<ActivationSpec>,
    /// The embedding table that another rank uses too.
    tied_embedding: Option<TiedEmbedding>,
    /// Whether the deferral of weight gradients has been logged.
    has_logged: Cell<bool>,
}

/// The pairs of ranks, sender first, between which the schedule sends messages.
fn message_pairs(schedule: &Schedule) -> Vec<(usize, usize)> {
    let neighbors = schedule
        .stage_to_rank
        .windows(2)
        .map(|pair| (pair[0], pair[1]));
    let both_ways = neighbors.flat_map(|(a, b)| [(a, b), (b, a)]);
    let pairs: BTreeSet<(usize, usize)> = both_ways.filter(|(a, b)| a != b).collect();
    pairs.into_iter().collect()
}

impl Pipeline {
    /// Builds a pipeline from this rank's `stages`, in the order of the schedule, and the `activations` between
    /// all stages.
    pub fn new(
        schedule: Schedule,
        stages: Vec<Box<dyn DataParallelWrapper>>,
        group: &Group,
        activations: Vec<ActivationSpec>,
        policy: ShardingPolicy,
    ) -> Result<Pipeline> {
        let own = schedule.stages_of(group.index());
        let num_boundaries = schedule.num_stages().saturating_sub(1);
        if schedule.num_ranks() != group.size()
            || own.len() != stages.len()
            || activations.len() != num_boundaries
        {
            return Err(ParallelError::StageMismatch {
                num_ranks: schedule.num_ranks(),
                group_size: group.size(),
                num_stages: own.len(),
                given: stages.len(),
            });
        }
        group.connect_pairs(&message_pairs(&schedule))?;
        let mut program = schedule.program(policy);
        let instructions = program.ranks.swap_remove(group.index());
        Ok(Pipeline {
            plan: planned_instruction::plan(instructions),
            has_logged: Cell::new(false),
            tied_embedding: None,
            stages: own.into_iter().zip(stages).collect(),
            group: group.clone(),
            policy,
            schedule,
            activations,
        })
    }

    /// Adds an embedding table that the first and the last stage share.
    #[must_use]
    pub fn with_tied_embedding(mut self, tied: Option<TiedEmbedding>) -> Pipeline {
        self.tied_embedding = tied;
        self
    }

    /// The schedule that the pipeline executes.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    fn last_stage(&self) -> usize {
        self.schedule.num_stages() - 1
    }

    fn strategy(&self, stage: usize) -> Result<&dyn DataParallelWrapper> {
        let found = self.stages.iter().find(|(number, _)| *number == stage);
        let (_, strategy) = found.ok_or(ParallelError::UnexpectedTask { stage })?;
        Ok(&**strategy)
    }

    /// How often a stage communicates in a step.
    fn comm_counts(&self, stage: usize) -> CommCounts {
        let count = |wanted: Instruction| {
            let plan = self.plan.iter();
            plan.filter(|planned| planned.executes(wanted)).count() as u64
        };
        let num_gathers = count(Instruction::Unshard(stage));
        CommCounts {
            num_microbatches: self.schedule.num_microbatches as u64,
            num_reductions: count(Instruction::Reduce(stage)),
            num_gathers: self.policy.max_unsharded.map(|_| num_gathers),
        }
    }

    /// Steps the optimizer stage by stage, with only the gradients of that stage set.
    fn step_by_stage(&self, step: &mut OptimizerStep<'_>) -> Result<()> {
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
            stage.optimizer_step(step)?;
            for (parameter, _) in &gradients {
                parameter.set_gradient(None);
            }
        }
        Ok(())
    }
}

impl Strategy for Pipeline {
    fn run_step(&self, step: &StepInputs<'_>) -> Result<Option<Tensor>> {
        let total = Execution::new(self, step).train()?;
        for (_, stage) in &self.stages {
            stage.finish_reduce()?;
        }
        if let Some(tied) = &self.tied_embedding {
            tied.all_reduce(&self.group)?;
        }
        Ok(total)
    }

    fn evaluate(&self, step: &StepInputs<'_>) -> Result<Option<Tensor>> {
        Execution::new(self, step).evaluate()
    }

    fn zero_grad(&self) -> Result<()> {
        self.stages.iter().try_for_each(|(_, s)| s.zero_grad())
    }

    fn optimizer_step(&self, step: &mut OptimizerStep<'_>) -> Result<()> {
        match &self.stages[..] {
            [(_, only)] => only.optimizer_step(step),
            several if several.iter().any(|(_, s)| s.steps_per_unit()) => self.step_by_stage(step),
            _ => step.take(),
        }
    }

    fn reads_inputs(&self) -> bool {
        self.stages.iter().any(|(number, _)| *number == 0)
    }

    fn reads_targets(&self) -> bool {
        let last = self.last_stage();
        self.stages.iter().any(|(number, _)| *number == last)
    }

    fn tied_replicas(&self) -> Vec<Parameter> {
        let replica = self
            .tied_embedding
            .as_ref()
            .and_then(TiedEmbedding::replica);
        replica.into_iter().cloned().collect()
    }

    fn wait_pending(&self) -> Result<()> {
        self.stages.iter().try_for_each(|(_, s)| s.wait_pending())
    }

    fn param_states(&self) -> Result<Vec<ParamState>> {
        let stages = self.stages.iter().map(|(_, stage)| stage.param_states());
        let states = stages.collect::<Result<Vec<_>>>()?;
        Ok(states.into_iter().flatten().collect())
    }

    fn visit_states(
        &self,
        optimizer: Option<&dyn Optimizer>,
        visitor: &mut StateVisitor<'_>,
    ) -> Result<()> {
        let mut stages = self.stages.iter();
        stages.try_for_each(|(_, stage)| stage.visit_states(optimizer, visitor))
    }

    fn load_states(
        &self,
        optimizer: &mut dyn Optimizer,
        visitor: &mut StateLoader<'_>,
    ) -> Result<()> {
        let mut stages = self.stages.iter();
        stages.try_for_each(|(_, stage)| stage.load_states(optimizer, visitor))
    }

    fn offload_counters(&self) -> Vec<Counters> {
        let stages = self.stages.iter();
        stages
            .flat_map(|(_, stage)| stage.offload_counters())
            .collect()
    }
}

impl CostModel for Pipeline {
    fn volume(&self, _: CommCounts, world_size: usize) -> Volume {
        let of_stage = |(number, stage): &(usize, Box<dyn DataParallelWrapper>)| {
            stage.volume(self.comm_counts(*number), world_size / self.group.size())
        };
        let mut volume: Volume = self.stages.iter().map(of_stage).sum();
        if let Some(tied) = &self.tied_embedding {
            // Only the ranks of the stage that owns the table count its bytes.
            let num_pipelines = (world_size / self.group.size()) as u64;
            let is_owner = tied.replica().is_none();
            let sent = if is_owner { tied.sent() } else { 0 };
            volume.gradients += num_pipelines * sent;
            volume.reduced += tied.sent();
        }
        volume
    }

    fn states(&self) -> StateBytes {
        self.stages.iter().map(|(_, s)| s.states()).sum()
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
                ParallelError::FullStepsOnly,
            )),
        }
    }

    fn layer_comm_bytes(&self, num_tokens: u64) -> Option<u64> {
        let (_, stage) = self.stages.first()?;
        let within = stage.layer_comm_bytes(num_tokens)?;
        let pairs = self
            .schedule
            .stage_to_rank
            .windows(2)
            .zip(&self.activations);
        let between = pairs.filter(|(pair, _)| pair[0] != pair[1]);
        // Activations forward, their gradients backward.
        let between = between.map(|(_, activation)| 2 * activation.sent(num_tokens));
        Some(within + between.sum::<u64>())
    }
}
