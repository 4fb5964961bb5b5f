//! Encoded collectives: numbers travel encoded and are added in float32.

use std::sync::Arc;

use tch::{Kind, Tensor};
use trainyard_torch::{Group, ReduceOp, Result, Work, autograd};
use trainyard_trace::Purpose;

use super::codec::Codec;
use super::hook::summed_as;

/// A flat tensor as one row of float32 for each rank, padded with zeros.
pub(super) fn rows_of_ranks(flat: &Tensor, num_ranks: usize) -> Result<Tensor> {
    let chunk = flat.numel().div_ceil(num_ranks);
    let missing = (chunk * num_ranks - flat.numel()) as i64;
    let flat = flat.f_view(-1i64)?.f_to_kind(Kind::Float)?;
    Ok(flat
        .f_constant_pad_nd([0, missing])?
        .f_view([num_ranks as i64, -1])?)
}

/// An all-to-all of encoded rows.
pub(crate) struct EncodedScatter {
    work: Work,
    received: Tensor,
    length: usize,
}

impl EncodedScatter {
    /// Sends row `p` of `encoded`, which encodes `length` numbers, to rank `p`.
    pub(super) fn start(
        group: &Group,
        encoded: &Tensor,
        length: usize,
        purpose: Purpose,
    ) -> Result<EncodedScatter> {
        let received = encoded.f_empty_like()?;
        let splits = vec![1; group.size()];
        Ok(EncodedScatter {
            work: group.all_to_all(&received, encoded, &splits, &splits, purpose)?,
            received,
            length,
        })
    }

    /// The sum of the rows of all ranks, in the order of ranks.
    pub(super) fn sum(self, codec: &dyn Codec) -> Result<Tensor> {
        self.work.wait()?;
        let rows = codec.decode(&self.received, self.length)?;
        Ok(rows.f_sum_dim_intlist([0i64].as_slice(), true, Kind::Float)?)
    }
}

/// An all-gather of one encoded row of every rank.
pub(crate) struct EncodedGather {
    work: Work,
    gathered: Tensor,
    length: usize,
}

impl EncodedGather {
    /// Gathers `encoded`, a row that encodes `length` numbers.
    pub(super) fn start(
        group: &Group,
        encoded: &Tensor,
        length: usize,
        purpose: Purpose,
    ) -> Result<EncodedGather> {
        let gathered = encoded.f_repeat([group.size() as i64, 1])?;
        Ok(EncodedGather {
            work: group.all_gather(&gathered, encoded, purpose)?,
            gathered,
            length,
        })
    }

    /// The rows of all ranks.
    pub(super) fn rows(self, codec: &dyn Codec) -> Result<Tensor> {
        self.work.wait()?;
        codec.decode(&self.gathered, self.length)
    }
}

/// An all-gather in flight, encoded or not.
pub(crate) enum Gather {
    Plain(Work),
    Encoded {
        gather: EncodedGather,
        codec: Arc<dyn Codec>,
        out: Tensor,
    },
}

impl Gather {
    /// Gathers the shards of all ranks in `out`.
    pub(crate) fn start(
        group: &Group,
        codec: Option<&Arc<dyn Codec>>,
        (out, shard): (&Tensor, &Tensor),
        purpose: Purpose,
    ) -> Result<Gather> {
        let Some(codec) = codec.filter(|_| group.size() > 1) else {
            return Ok(Gather::Plain(group.all_gather(out, shard, purpose)?));
        };
        let row = shard.f_view([1, -1])?.f_to_kind(Kind::Float)?;
        let encoded = codec.encode(&row)?;
        Ok(Gather::Encoded {
            gather: EncodedGather::start(group, &encoded, shard.numel(), purpose)?,
            codec: Arc::clone(codec),
            out: out.shallow_clone(),
        })
    }

    /// Waits until the output is complete.
    pub(crate) fn wait(self) -> Result<()> {
        match self {
            Gather::Plain(work) => work.wait(),
            Gather::Encoded { gather, codec, out } => {
                let rows = gather.rows(&*codec)?.f_reshape(-1i64)?;
                // A parameter that backward has saved is gathered again with the same values.
                autograd::without_version_bump(&out, || {
                    tch::no_grad(|| out.shallow_clone().f_copy_(&rows))
                })??;
                Ok(())
            }
        }
    }
}

/// A reduce-scatter in flight, encoded or not.
pub(crate) enum ReduceScatter {
    Plain(Work),
    Encoded {
        scatter: EncodedScatter,
        codec: Arc<dyn Codec>,
        out: Tensor,
        op: ReduceOp,
        num_ranks: usize,
    },
}

impl ReduceScatter {
    /// Reduces `input` to this rank's shard of it, in `out`.
    pub(crate) fn start(
        group: &Group,
        codec: Option<&Arc<dyn Codec>>,
        (out, input): (&Tensor, &Tensor),
        op: ReduceOp,
        purpose: Purpose,
    ) -> Result<ReduceScatter> {
        let Some(codec) = codec.filter(|_| group.size() > 1) else {
            let work = group.reduce_scatter(out, input, op, purpose)?;
            return Ok(ReduceScatter::Plain(work));
        };
        let rows = rows_of_ranks(input, group.size())?;
        let encoded = codec.encode(&rows)?;
        Ok(ReduceScatter::Encoded {
            scatter: EncodedScatter::start(group, &encoded, out.numel(), purpose)?,
            codec: Arc::clone(codec),
            out: out.shallow_clone(),
            op,
            num_ranks: group.size(),
        })
    }

    /// Waits until the output is complete.
    pub(crate) fn wait(self) -> Result<()> {
        match self {
            ReduceScatter::Plain(work) => work.wait(),
            ReduceScatter::Encoded {
                scatter,
                codec,
                mut out,
                op,
                num_ranks,
            } => {
                let sum = summed_as(scatter.sum(&*codec)?, op, num_ranks)?;
                tch::no_grad(|| out.f_copy_(&sum.f_view_as(&out)?))?;
                Ok(())
            }
        }
    }
}
