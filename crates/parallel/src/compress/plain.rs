//! All-reduces of a bucket as it is, or in another type.

use tch::{Kind, Tensor};
use trainyard_cost::Volume;
use trainyard_torch::{Group, ReduceOp, Result, Work};

use super::hook::{GradientBucket, GradientHook, Reduction, all_reduce_volume};

/// All-reduces gradients in their own type.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlainReduction;

impl GradientHook for PlainReduction {
    fn reduce(
        &self,
        group: &Group,
        bucket: &GradientBucket<'_>,
        op: ReduceOp,
    ) -> Result<Box<dyn Reduction>> {
        Ok(Box::new(group.all_reduce(
            bucket.flat,
            op,
            bucket.purpose,
        )?))
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
    fn reduce(
        &self,
        group: &Group,
        bucket: &GradientBucket<'_>,
        op: ReduceOp,
    ) -> Result<Box<dyn Reduction>> {
        let compressed = bucket.flat.f_to_kind(self.0)?;
        Ok(Box::new(Compressed {
            work: group.all_reduce(&compressed, op, bucket.purpose)?,
            compressed,
            bucket: bucket.flat.shallow_clone(),
        }))
    }

    fn volume(&self, bucket: &GradientBucket<'_>, num_ranks: usize) -> Volume {
        all_reduce_volume(bucket.flat.numel(), self.0, num_ranks)
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
