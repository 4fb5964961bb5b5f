//! An all-reduce in two encoded hops: as a reduce-scatter by all-to-all, then an all-gather.

use std::sync::Arc;

use tch::Tensor;
use trainyard_cost::Volume;
use trainyard_torch::{Group, ReduceOp, Result};
use trainyard_trace::Purpose;

use super::codec::Codec;
use super::exchange::{EncodedGather, EncodedScatter, rows_of_ranks};
use super::hook::{GradientBucket, GradientHook, Reduction, summed_as};

/// Reduces gradients in two encoded hops. Each number is rounded twice, whatever the number of ranks, because sums are
/// computed in float32.
#[derive(Debug)]
pub struct TwoHopReduction {
    codec: Arc<dyn Codec>,
}

impl TwoHopReduction {
    /// Reduces with a codec.
    pub fn new(codec: Arc<dyn Codec>) -> TwoHopReduction {
        TwoHopReduction { codec }
    }
}

struct InFlight {
    codec: Arc<dyn Codec>,
    group: Group,
    scatter: EncodedScatter,
    chunk: usize,
    op: ReduceOp,
    purpose: Purpose,
    flat: Tensor,
}

impl GradientHook for TwoHopReduction {
    fn reduce(
        &self,
        group: &Group,
        bucket: &GradientBucket<'_>,
        op: ReduceOp,
    ) -> Result<Box<dyn Reduction>> {
        let rows = rows_of_ranks(bucket.flat, group.size())?;
        let chunk = rows.size2()?.1 as usize;
        let encoded = self.codec.encode(&rows)?;
        Ok(Box::new(InFlight {
            scatter: EncodedScatter::start(group, &encoded, chunk, bucket.purpose)?,
            codec: Arc::clone(&self.codec),
            group: group.clone(),
            chunk,
            op,
            purpose: bucket.purpose,
            flat: bucket.flat.shallow_clone(),
        }))
    }

    fn volume(&self, bucket: &GradientBucket<'_>, num_ranks: usize) -> Volume {
        let length = bucket.flat.numel() as u64;
        self.codec.encoding().all_reduce_volume(length, num_ranks)
    }
}

impl Reduction for InFlight {
    fn finish(self: Box<Self>) -> Result<()> {
        let sum = self.scatter.sum(&*self.codec)?;
        let sum = summed_as(sum, self.op, self.group.size())?;
        let encoded = self.codec.encode(&sum)?;
        let gather = EncodedGather::start(&self.group, &encoded, self.chunk, self.purpose)?;
        let reduced = gather.rows(&*self.codec)?.f_reshape(-1i64)?;
        let mut flat = self.flat;
        flat.f_copy_(&reduced.f_narrow(0, 0, flat.numel() as i64)?)?;
        Ok(())
    }
}
