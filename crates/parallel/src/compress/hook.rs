//! Communication hooks of DDP, which reduce its buckets.

use tch::{Kind, Tensor};
use trainyard_cost::{Volume, replicated_volume};
use trainyard_torch::{Group, ReduceOp, Result};
use trainyard_trace::Purpose;

/// A full bucket of gradients.
#[derive(Debug)]
pub struct GradientBucket<'a> {
    /// Its number, the same in every step.
    pub index: usize,
    /// The training step, counted from 0.
    pub step: u64,
    /// What the gradients are of: a step, or an outer step.
    pub purpose: Purpose,
    /// The gradients, one after another.
    pub flat: &'a Tensor,
    /// The gradient of every parameter, as a view of `flat`.
    pub members: Vec<&'a Tensor>,
    /// What earlier steps have not sent, in float32 and laid out as `flat`, if the hook keeps errors. The hook adds it to the
    /// gradients, and replaces it.
    pub error: Option<&'a Tensor>,
}

impl GradientBucket<'_> {
    /// The error of a member, as a view of `error`.
    pub(crate) fn error_of(&self, member: usize) -> Result<Option<Tensor>> {
        let Some(error) = self.error else {
            return Ok(None);
        };
        let before = self.members[..member].iter().map(|view| view.numel());
        let (start, view) = (before.sum::<usize>(), self.members[member]);
        let error = error.f_narrow(0, start as i64, view.numel() as i64)?;
        Ok(Some(error.f_view(view.size().as_slice())?))
    }
}

/// Reduces buckets of gradients, as a DDP communication hook. It is called during backward, so it must not wait.
pub trait GradientHook: Send + Sync {
    /// Starts to reduce a bucket.
    fn reduce(
        &self,
        group: &Group,
        bucket: &GradientBucket<'_>,
        op: ReduceOp,
    ) -> Result<Box<dyn Reduction>>;

    /// The communication of a bucket over `num_ranks` ranks.
    fn volume(&self, bucket: &GradientBucket<'_>, num_ranks: usize) -> Volume {
        all_reduce_volume(bucket.flat.numel(), bucket.flat.kind(), num_ranks)
    }

    /// Whether the hook keeps what it does not send, for later steps: error feedback.
    fn keeps_errors(&self) -> bool {
        false
    }
}

/// The communication of an all-reduce of `length` numbers.
pub(super) fn all_reduce_volume(length: usize, kind: Kind, num_ranks: usize) -> Volume {
    replicated_volume((length * kind.elt_size_in_bytes()) as u64, num_ranks)
}

/// A reduction in flight.
pub trait Reduction: Send {
    /// Waits until the bucket holds the reduced gradients.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// The sum over ranks as `op` asks for it.
pub(super) fn summed_as(sum: Tensor, op: ReduceOp, num_ranks: usize) -> Result<Tensor> {
    match op {
        ReduceOp::Mean => Ok(sum.f_div_scalar(num_ranks as f64)?),
        _ => Ok(sum),
    }
}
