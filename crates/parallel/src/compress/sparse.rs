//! A sum of sparse gradients: every rank gathers the few numbers of all others.

use std::sync::Arc;

use tch::{Kind, Tensor};
use trainyard_cost::Volume;
use trainyard_torch::{Group, ReduceOp, Result};

use super::codec::Codec;
use super::error_feedback;
use super::exchange::EncodedGather;
use super::hook::{GradientBucket, GradientHook, Reduction, summed_as};

/// Gathers the encoded gradients of all ranks and adds them up, with error feedback. The bytes that a rank receives grow
/// with the number of ranks, so it pays only if a codec keeps little.
#[derive(Debug)]
pub struct SparseReduction {
    codec: Arc<dyn Codec>,
}

impl SparseReduction {
    /// Reduces with a codec.
    pub fn new(codec: impl Codec) -> SparseReduction {
        SparseReduction {
            codec: Arc::new(codec),
        }
    }
}

struct InFlight {
    codec: Arc<dyn Codec>,
    gather: EncodedGather,
    num_ranks: usize,
    op: ReduceOp,
    flat: Tensor,
}

impl GradientHook for SparseReduction {
    fn reduce(
        &self,
        group: &Group,
        bucket: &GradientBucket<'_>,
        op: ReduceOp,
    ) -> Result<Box<dyn Reduction>> {
        let encoded = error_feedback::encode(&*self.codec, bucket.flat, bucket.error)?;
        let length = bucket.flat.numel();
        Ok(Box::new(InFlight {
            gather: EncodedGather::start(group, &encoded, length, bucket.purpose)?,
            codec: Arc::clone(&self.codec),
            num_ranks: group.size(),
            op,
            flat: bucket.flat.shallow_clone(),
        }))
    }

    fn volume(&self, bucket: &GradientBucket<'_>, num_ranks: usize) -> Volume {
        let length = bucket.flat.numel() as u64;
        self.codec.encoding().gather_volume(length, num_ranks)
    }

    fn keeps_errors(&self) -> bool {
        true
    }
}

impl Reduction for InFlight {
    fn finish(self: Box<Self>) -> Result<()> {
        let rows = self.gather.rows(&*self.codec)?;
        let sum = rows.f_sum_dim_intlist([0i64].as_slice(), false, Kind::Float)?;
        let mut flat = self.flat;
        flat.f_copy_(&summed_as(sum, self.op, self.num_ranks)?)?;
        Ok(())
    }
}
