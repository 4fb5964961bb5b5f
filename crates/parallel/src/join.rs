//! Uneven inputs: ranks with fewer batches take part until the last rank is done.
//!
//! A collective needs all ranks. A rank that has no more batches therefore goes on with its last one, and its loss has no
//! weight, so that all ranks run the same code: every strategy works, whatever it communicates in forward, in backward and in
//! the optimizer. The loss is divided by the number of targets that ranks have in this step, so that each sample has the
//! same weight, as on one rank.
//!
//! ```no_run
//! # use tch::Tensor;
//! # use trainyard_parallel::{DataParallelWrapper, GradSync, Join, Result};
//! # use trainyard_torch::Group;
//! # fn train(model: &dyn DataParallelWrapper, group: &Group, batches: Vec<(Tensor, Tensor)>) -> Result<()> {
//! // `model` is wrapped with `ReduceOp::Sum`, because losses are divided by the global number of targets.
//! let mut join = Join::new(batches, group, |(_, targets)| targets.numel() as u64);
//! while let Some(step) = join.next()? {
//!     let (inputs, targets) = step.batch;
//!     let run = model.forward(inputs, &step.context())?;
//!     let loss = step.weighted(&model.loss(run.output(), targets)?)?;
//!     model.backward(run, &loss, GradSync::Full)?;
//!     // optimizer step
//! }
//! # Ok(())
//! # }
//! ```

use tch::{Kind, Tensor};
use trainyard_nn::Context;
use trainyard_torch::{Group, ReduceOp};
use trainyard_trace::Purpose;

use crate::error::{ParallelError, Result};

/// The batches of a rank, and those that it repeats until all ranks are done.
pub struct Join<I: Iterator, F> {
    batches: I,
    last: Option<I::Item>,
    group: Group,
    num_targets: F,
    step: u64,
}

/// One step of a [`Join`].
pub struct JoinedStep<'a, T> {
    /// This rank's batch: a new one, or its last one again if it is idle.
    pub batch: &'a T,
    /// The number of the step, from 0.
    pub step: u64,
    /// The targets of this step on all ranks that are not idle.
    pub num_targets: u64,
    /// Whether this rank has no more batches.
    pub is_idle: bool,
}

impl<I: Iterator, F: Fn(&I::Item) -> u64> Join<I, F> {
    /// Joins `batches` with those of the other ranks of `group`; `num_targets` counts the targets of a batch.
    pub fn new(
        batches: impl IntoIterator<IntoIter = I>,
        group: &Group,
        num_targets: F,
    ) -> Join<I, F> {
        Join {
            batches: batches.into_iter(),
            last: None,
            group: group.clone(),
            num_targets,
            step: 0,
        }
    }

    /// The next step, or none if no rank has a batch left. All ranks of the group must call this, and each must have a batch at
    /// first.
    #[expect(
        clippy::should_implement_trait,
        reason = "a step borrows its batch, which an iterator cannot express"
    )]
    pub fn next(&mut self) -> Result<Option<JoinedStep<'_, I::Item>>> {
        let next = self.batches.next();
        let own = next.as_ref().map(&self.num_targets);
        let (num_active, num_targets) = self.sum_over_ranks(own)?;
        if num_active == 0 {
            return Ok(None);
        }
        if next.is_some() {
            self.last = next;
        }
        let Some(batch) = &self.last else {
            return Err(self.without_batches(num_active));
        };
        if self.step == 0 && num_active < self.group.size() as u64 {
            return Err(self.without_batches(num_active));
        }
        let step = self.step;
        self.step += 1;
        Ok(Some(JoinedStep {
            batch,
            step,
            num_targets,
            is_idle: own.is_none(),
        }))
    }

    fn without_batches(&self, num_active: u64) -> ParallelError {
        ParallelError::NoBatches {
            number: self.group.size() as u64 - num_active,
            group: self.group.name().to_owned(),
        }
    }

    /// The number of ranks that have a batch, and of targets that they have together. On the host, because the host needs
    /// them.
    fn sum_over_ranks(&self, own: Option<u64>) -> Result<(u64, u64)> {
        let counts = [u64::from(own.is_some()) as i64, own.unwrap_or(0) as i64];
        let sums = Tensor::f_from_slice(&counts)?.f_to_kind(Kind::Int64)?;
        self.group
            .all_reduce(&sums, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        let sums = Vec::<i64>::try_from(sums)?;
        Ok((sums[0] as u64, sums[1] as u64))
    }
}

impl<T> JoinedStep<'_, T> {
    /// The context of this rank's training pass.
    pub fn context(&self) -> Context {
        Context {
            is_idle: self.is_idle,
            ..Context::training(self.step)
        }
    }

    /// This rank's part of the mean loss over all targets of the step, from the sum over its own.
    pub fn weighted(&self, sum: &Tensor) -> Result<Tensor> {
        let weight = if self.is_idle {
            0.0
        } else {
            1.0 / self.num_targets as f64
        };
        Ok(sum.f_mul_scalar(weight)?)
    }
}
