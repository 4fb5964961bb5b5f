//! A hook that measures how exactly another one reduces.

use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use trainyard_cost::Volume;
use trainyard_torch::{Group, ReduceOp, Result};
use trainyard_trace::Purpose;

use super::hook::{GradientBucket, GradientHook, Reduction};
use crate::lock::lock;

/// Runs another hook, and compares what it reduces with an all-reduce in full precision. What the hook keeps for later
/// steps counts as sent, because it will be.
pub struct AuditedReduction {
    hook: Box<dyn GradientHook>,
    worst: Arc<Mutex<f64>>,
}

impl AuditedReduction {
    /// Audits a hook.
    pub fn new(hook: Box<dyn GradientHook>) -> AuditedReduction {
        AuditedReduction {
            hook,
            worst: Arc::default(),
        }
    }

    /// The largest difference of a gradient so far, relative to the largest one of its bucket.
    pub fn worst(&self) -> Arc<Mutex<f64>> {
        Arc::clone(&self.worst)
    }
}

struct InFlight {
    reduction: Box<dyn Reduction>,
    worst: Arc<Mutex<f64>>,
    group: Group,
    op: ReduceOp,
    flat: Tensor,
    error: Option<Tensor>,
    /// The gradients of this rank, and the error of earlier steps.
    own: Tensor,
}

impl GradientHook for AuditedReduction {
    fn reduce(
        &self,
        group: &Group,
        bucket: &GradientBucket<'_>,
        op: ReduceOp,
    ) -> Result<Box<dyn Reduction>> {
        let own = bucket.flat.f_detach_copy()?.f_to_kind(Kind::Double)?;
        let own = match bucket.error {
            Some(error) => own.f_add(error)?,
            None => own,
        };
        Ok(Box::new(InFlight {
            reduction: self.hook.reduce(group, bucket, op)?,
            worst: Arc::clone(&self.worst),
            group: group.clone(),
            op,
            flat: bucket.flat.shallow_clone(),
            error: bucket.error.map(Tensor::shallow_clone),
            own,
        }))
    }

    fn volume(&self, bucket: &GradientBucket<'_>, num_ranks: usize) -> Volume {
        self.hook.volume(bucket, num_ranks)
    }

    fn keeps_errors(&self) -> bool {
        self.hook.keeps_errors()
    }
}

impl Reduction for InFlight {
    fn finish(self: Box<Self>) -> Result<()> {
        self.reduction.finish()?;
        let sent = match &self.error {
            Some(error) => self.own.f_sub(error)?,
            None => self.own,
        };
        self.group
            .all_reduce(&sent, self.op, Purpose::Control)?
            .wait()?;
        let off = self.flat.f_to_kind(Kind::Double)?.f_sub(&sent)?;
        let largest = |x: &Tensor| -> Result<f64> { Ok(f64::try_from(x.f_abs()?.f_max()?)?) };
        let off = largest(&off)? / largest(&sent)?.max(f64::MIN_POSITIVE);
        let mut worst = lock(&self.worst);
        // A NaN stays.
        *worst = if off > *worst || off.is_nan() {
            off
        } else {
            *worst
        };
        Ok(())
    }
}
