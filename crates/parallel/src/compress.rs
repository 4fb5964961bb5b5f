//! Communication hooks of DDP: reduction of a bucket as it is, or compressed.

use tch::{Kind, Tensor};
use trainyard_torch::{Group, ReduceOp, Result, Work};
use trainyard_trace::Purpose;

/// Reduces buckets of gradients, as a DDP communication hook. It is called during backward, so it must not wait.
pub trait GradientHook: Send + Sync {
    /// Starts to reduce a bucket.
    fn reduce(&self, group: &Group, bucket: &Tensor, op: ReduceOp) -> Result<Box<dyn Reduction>>;

    /// Bytes per element of `kind` as it is communicated.
    fn width(&self, kind: Kind) -> u64 {
        kind.elt_size_in_bytes() as u64
    }
}

/// A reduction in flight.
pub trait Reduction: Send {
    /// Waits until the bucket holds the reduced gradients.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// All-reduces gradients in their own type.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlainReduction;

impl GradientHook for PlainReduction {
    fn reduce(&self, group: &Group, bucket: &Tensor, op: ReduceOp) -> Result<Box<dyn Reduction>> {
        Ok(Box::new(group.all_reduce(bucket, op, Purpose::Gradient)?))
    }
}

impl Reduction for Work {
    fn finish(self: Box<Self>) -> Result<()> {
        self.wait()
    }
}

/// All-reduces gradients in another type: `BFloat16` sends half of the bytes of float32, with 8 bits of precision.
#[derive(Debug, Clone, Copy)]
pub struct CastReduction(pub Kind);

struct Compressed {
    work: Work,
    compressed: Tensor,
    bucket: Tensor,
}

impl GradientHook for CastReduction {
    fn reduce(&self, group: &Group, bucket: &Tensor, op: ReduceOp) -> Result<Box<dyn Reduction>> {
        let compressed = bucket.f_to_kind(self.0)?;
        Ok(Box::new(Compressed {
            work: group.all_reduce(&compressed, op, Purpose::Gradient)?,
            compressed,
            bucket: bucket.shallow_clone(),
        }))
    }

    fn width(&self, _: Kind) -> u64 {
        self.0.elt_size_in_bytes() as u64
    }
}

impl Reduction for Compressed {
    fn finish(self: Box<Self>) -> Result<()> {
        let Compressed {
            work,
            compressed,
            mut bucket,
        } = *self;
        work.wait()?;
        bucket.f_copy_(&compressed)?;
        Ok(())
    }
}
