//! Parameters that are joined together.

use std::sync::Arc;

use tch::{Kind, Tensor};
use trainyard_cost::Volume;
use trainyard_nn::Parameter;
use trainyard_torch::{Group, ReduceOp, memory};
use trainyard_trace::{MemoryKind, Purpose};

use super::{OuterOptimizer, OuterOptions};
use crate::compress::{GradientBucket, GradientHook, Reduction};
use crate::error::{ParallelError, Result};
use crate::flat::{FlatParam, view_as, zeros_flat};
use crate::param_state::ParamState;

/// Some parameters of this rank, with their outer parameters.
pub(super) struct Fragment {
    index: usize,
    members: Vec<Member>,
    /// The outer gradients: those of this replica until they are reduced.
    gradients: Tensor,
    /// What the hook has not sent.
    error: Option<Tensor>,
    in_flight: Option<Box<dyn Reduction>>,
    hook: Arc<dyn GradientHook>,
    optimizer: OuterOptimizer,
    update_alpha: f64,
    error_decay: f64,
}

/// A parameter, in float32 but for `parameter` itself.
struct Member {
    parameter: Parameter,
    outer: Tensor,
    momentum: Option<Tensor>,
    /// Its part of the outer gradients, and of the error.
    gradient: Tensor,
    error: Option<Tensor>,
}

impl Fragment {
    pub(super) fn new(
        index: usize,
        parameters: &[Parameter],
        group: &Group,
        options: &OuterOptions,
    ) -> Result<Fragment> {
        let Some(first) = parameters.first() else {
            return Err(ParallelError::NothingToShard);
        };
        let lengths = parameters.iter().map(|p| p.tensor().numel()).collect();
        let layout = FlatParam::new(lengths, 1);
        let kind = outer_kind(first);
        let zeros = || {
            memory::scope(MemoryKind::Optimizer, || {
                zeros_flat(&first.tensor().f_detach()?, layout.total(), kind)
            })
        };
        let keeps_errors = options.hook.keeps_errors() && group.size() > 1;
        let (outer, gradients) = (zeros()?, zeros()?);
        let momentum = (options.optimizer.momentum != 0.0)
            .then(zeros)
            .transpose()?;
        let error = keeps_errors.then(zeros).transpose()?;
        let member = |(number, parameter): (usize, &Parameter)| -> Result<Member> {
            let of = |flat: &Tensor| view_as(flat, layout.interval(number), parameter.tensor());
            Ok(Member {
                parameter: parameter.clone(),
                outer: of(&outer)?,
                momentum: momentum.as_ref().map(of).transpose()?,
                gradient: of(&gradients)?,
                error: error.as_ref().map(of).transpose()?,
            })
        };
        let members = parameters.iter().enumerate().map(member);
        let mut fragment = Fragment {
            index,
            members: members.collect::<Result<_>>()?,
            gradients,
            error,
            in_flight: None,
            hook: Arc::clone(&options.hook),
            optimizer: options.optimizer,
            update_alpha: options.update_alpha,
            error_decay: options.error_decay,
        };
        fragment.restart()?;
        Ok(fragment)
    }

    /// Takes the parameters as they are for the outer parameters.
    pub(super) fn restart(&mut self) -> Result<()> {
        self.in_flight = None;
        for member in &mut self.members {
            let values = member.parameter.tensor().f_detach()?;
            tch::no_grad(|| member.outer.f_copy_(&values))?;
        }
        Ok(())
    }

    /// Sends the outer gradients of this replica.
    pub(super) fn begin(&mut self, group: &Group, step: u64) -> Result<()> {
        tch::no_grad(|| -> Result<()> {
            for member in &mut self.members {
                let values = member.parameter.tensor().f_detach()?;
                let moved = member
                    .outer
                    .f_sub(&values.f_to_kind(member.outer.kind())?)?;
                member.gradient.f_copy_(&moved)?;
            }
            if let Some(error) = &mut self.error {
                let _ = error.f_mul_scalar_(self.error_decay)?;
            }
            Ok(())
        })?;
        if group.size() > 1 {
            let bucket = self.bucket(step);
            self.in_flight = Some(self.hook.reduce(group, &bucket, ReduceOp::Mean)?);
        }
        Ok(())
    }

    /// Waits for the mean outer gradients, and takes an outer step. A fragment whose communication was lost in a restart of the
    /// job sends it first.
    pub(super) fn end(&mut self, group: &Group, step: u64) -> Result<()> {
        if self.in_flight.is_none() && group.size() > 1 {
            self.begin(group, step)?;
        }
        self.finish()
    }

    /// Takes the outer parameters for the parameters, which makes all replicas the same.
    pub(super) fn take_over(&mut self) -> Result<()> {
        for member in &self.members {
            let mut own = member.parameter.tensor().f_detach()?;
            tch::no_grad(|| own.f_copy_(&member.outer))?;
        }
        Ok(())
    }

    /// Ends the outer step that has begun, if there is one.
    pub(super) fn end_if_in_flight(&mut self) -> Result<()> {
        match self.in_flight {
            Some(_) => self.finish(),
            None => Ok(()),
        }
    }

    fn finish(&mut self) -> Result<()> {
        if let Some(reduction) = self.in_flight.take() {
            reduction.finish()?;
        }
        let (optimizer, alpha) = (self.optimizer, self.update_alpha);
        tch::no_grad(|| {
            let mut members = self.members.iter_mut();
            members.try_for_each(|member| member.step(optimizer, alpha))
        })
    }

    fn bucket(&self, step: u64) -> GradientBucket<'_> {
        GradientBucket {
            index: self.index,
            step,
            purpose: Purpose::OuterGradient,
            flat: &self.gradients,
            members: self.members.iter().map(|member| &member.gradient).collect(),
            error: self.error.as_ref(),
        }
    }

    pub(super) fn volume(&self, num_ranks: usize) -> Volume {
        match num_ranks {
            1 => Volume::default(),
            _ => self.hook.volume(&self.bucket(0), num_ranks),
        }
    }

    pub(super) fn param_states(&self, group: &Group) -> Vec<ParamState> {
        let of_member = |member: &Member| {
            let state = |kind, tensor: &Tensor, summed_over: Option<&Group>| ParamState {
                kind,
                parameter: member.parameter.name().to_owned(),
                tensor: tensor.shallow_clone(),
                summed_over: summed_over.cloned(),
            };
            let momentum = member.momentum.as_ref();
            let error = member.error.as_ref();
            [
                Some(state("outer_param", &member.outer, None)),
                momentum.map(|momentum| state("outer_momentum", momentum, None)),
                error.map(|error| state("outer_error", error, Some(group))),
            ]
        };
        let states = self.members.iter().flat_map(of_member);
        states.flatten().collect()
    }
}

impl Member {
    /// Updates the outer parameter with the mean outer gradient, and the own one with the outer parameter.
    fn step(&mut self, optimizer: OuterOptimizer, alpha: f64) -> Result<()> {
        let direction = match &mut self.momentum {
            None => self.gradient.shallow_clone(),
            Some(momentum) => {
                let updated = momentum
                    .f_mul_scalar(optimizer.momentum)?
                    .f_add(&self.gradient)?;
                momentum.f_copy_(&updated)?;
                if optimizer.nesterov {
                    self.gradient
                        .f_add(&updated.f_mul_scalar(optimizer.momentum)?)?
                } else {
                    updated
                }
            }
        };
        let updated = self.outer.f_sub(&direction.f_mul_scalar(optimizer.lr)?)?;
        self.outer.f_copy_(&updated)?;
        let mut own = self.parameter.tensor().f_detach()?;
        let values = match alpha {
            0.0 => updated,
            alpha => updated.f_lerp(&own.f_to_kind(updated.kind())?, alpha)?,
        };
        own.f_copy_(&values)?;
        Ok(())
    }
}

/// Outer parameters have at least the precision of float32.
fn outer_kind(parameter: &Parameter) -> Kind {
    match parameter.kind() {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}
