//! Local updates: replicas take optimizer steps of their own, and an outer optimizer joins them now and then.
//!
//! All replicas begin with the same *outer parameters*. After some steps, each sends how far its own parameters have moved,
//! the *outer gradient*, and an outer optimizer updates the outer parameters with the mean. With a learning rate of 1 and
//! without momentum this averages parameters, which is local SGD; with Nesterov momentum it is DiLoCo. Parameters can be
//! divided into fragments that are joined at different steps, while training goes on: Streaming DiLoCo. A hook that compresses
//! gradients compresses outer gradients as well: with chunked top-k and error feedback this is SparseLoCo.

mod fragment;
mod rounds;

use std::ops::Range;
use std::sync::Arc;

use trainyard_cost::{Volume, partition_balanced};
use trainyard_nn::Parameter;
use trainyard_torch::{Group, ReduceOp};
use trainyard_trace::Purpose;

use crate::compress::GradientHook;
use crate::error::{ParallelError, Result};
use crate::param_state::ParamState;
use fragment::Fragment;
use rounds::Rounds;

/// The optimizer of the outer parameters: SGD.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OuterOptimizer {
    /// The learning rate.
    pub lr: f64,
    /// The momentum.
    pub momentum: f64,
    /// Whether the momentum is Nesterov's.
    pub nesterov: bool,
}

/// Options of [`OuterLoop`].
pub struct OuterOptions {
    /// Steps between two outer steps of a fragment.
    pub sync_steps: u64,
    /// Before this step, replicas average their gradients in every step.
    pub start_step: u64,
    /// The last step of the job, at which all replicas are joined.
    pub last_step: u64,
    /// The number of fragments.
    pub num_fragments: usize,
    /// Steps between the start of a fragment's communication and its end.
    pub sync_delay: u64,
    /// The share of its own parameters that a replica keeps when a fragment arrives.
    pub update_alpha: f64,
    /// The outer optimizer.
    pub optimizer: OuterOptimizer,
    /// Reduces outer gradients.
    pub hook: Arc<dyn GradientHook>,
    /// The share of the error of earlier outer steps that is sent, if the hook keeps errors.
    pub error_decay: f64,
}

/// Joins replicas that take steps of their own.
pub struct OuterLoop {
    /// The ranks that hold the same shards in other replicas.
    group: Group,
    rounds: Rounds,
    fragments: Vec<Fragment>,
    buffers: Vec<Parameter>,
    start_step: u64,
}

impl OuterLoop {
    /// An outer loop over the parameters of this rank. `group` are the ranks that hold the same shards in other replicas,
    /// with the same values.
    pub fn new(
        parameters: &[Parameter],
        group: &Group,
        options: &OuterOptions,
    ) -> Result<OuterLoop> {
        let (trained, buffers): (Vec<_>, Vec<_>) = parameters
            .iter()
            .cloned()
            .partition(Parameter::is_trainable);
        let fragments = ranges(&trained, options.num_fragments)?
            .into_iter()
            .enumerate()
            .map(|(index, range)| Fragment::new(index, &trained[range], group, options))
            .collect::<Result<Vec<_>>>()?;
        Ok(OuterLoop {
            group: group.clone(),
            rounds: Rounds {
                sync_steps: options.sync_steps,
                num_fragments: fragments.len() as u64,
                delay: options.sync_delay,
                first_step: options.start_step,
                last_step: options.last_step,
            },
            fragments,
            buffers: buffers
                .into_iter()
                .filter(|buffer| buffer.tensor().is_floating_point())
                .collect(),
            start_step: options.start_step,
        })
    }

    /// The ranks that hold the same shards in other replicas.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Whether replicas are joined after this step, counted from 1.
    pub fn is_joined_after(&self, step: u64) -> bool {
        step <= self.start_step || !self.rounds.after(step).is_empty()
    }

    /// Averages the gradients of all replicas, if they do not take steps of their own yet in this step, counted from 0.
    pub fn reduce_gradients(&self, parameters: &[Parameter], step: u64) -> Result<()> {
        if step >= self.start_step || self.group.size() == 1 {
            return Ok(());
        }
        let mut works = Vec::new();
        for parameter in parameters {
            if let Some(gradient) = parameter.gradient()? {
                let purpose = Purpose::OuterGradient;
                works.push(self.group.all_reduce(&gradient, ReduceOp::Mean, purpose)?);
            }
        }
        for work in works {
            work.wait()?;
        }
        Ok(())
    }

    /// Begins and ends the outer steps of fragments that are due after this step, counted from 1.
    pub fn after_step(&mut self, step: u64) -> Result<()> {
        if step == self.start_step {
            return self.restart();
        }
        for act in self.rounds.after(step) {
            let fragment = &mut self.fragments[act.fragment];
            if act.begins {
                fragment.end_if_in_flight()?;
                fragment.begin(&self.group, step)?;
            }
            if act.ends {
                fragment.end(&self.group, step)?;
            }
        }
        if step == self.rounds.last_step {
            let mut fragments = self.fragments.iter_mut();
            fragments.try_for_each(Fragment::take_over)?;
        }
        if self.rounds.is_end_of_round(step) {
            self.average_buffers()?;
        }
        Ok(())
    }

    /// Takes the parameters as they are for the outer parameters.
    pub fn restart(&mut self) -> Result<()> {
        self.fragments.iter_mut().try_for_each(Fragment::restart)
    }

    fn average_buffers(&self) -> Result<()> {
        for buffer in self.buffers.iter().filter(|_| self.group.size() > 1) {
            let work = self
                .group
                .all_reduce(buffer.tensor(), ReduceOp::Mean, Purpose::State)?;
            work.wait()?;
        }
        Ok(())
    }

    /// Outer parameters, momentum and errors, for checkpoints.
    pub fn param_states(&self) -> Vec<ParamState> {
        let fragments = self.fragments.iter();
        fragments
            .flat_map(|fragment| fragment.param_states(&self.group))
            .collect()
    }

    /// The communication of the ranks of this group in the first `steps` steps, without that before the start step.
    pub fn volume(&self, steps: u64) -> Volume {
        let acts = (1..=steps).flat_map(|step| self.rounds.after(step));
        let begins = acts.filter(|act| act.begins);
        begins
            .map(|act| self.fragments[act.fragment].volume(self.group.size()))
            .sum()
    }
}

/// Consecutive parameters of about the same number of elements each.
fn ranges(parameters: &[Parameter], num_fragments: usize) -> Result<Vec<Range<usize>>> {
    let sizes: Vec<f64> = parameters
        .iter()
        .map(|p| p.tensor().numel() as f64)
        .collect();
    let num_fragments = num_fragments.clamp(1, sizes.len().max(1));
    partition_balanced(&sizes, num_fragments).map_err(|_| ParallelError::NothingToShard)
}
