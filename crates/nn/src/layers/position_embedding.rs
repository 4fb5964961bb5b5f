//! Learned position embeddings.

use std::ops::Range;

use tch::Tensor;

use crate::{Builder, Init, Module, NnError, Parameter, Result, SequenceParallel, TensorParallel};

/// A table with one vector per position, which is added to the activations.
#[derive(Module, Debug)]
pub struct PositionEmbedding {
    weight: Parameter,
    /// The positions of this rank, in the order in which it has them.
    #[module(skip)]
    own: Vec<Range<usize>>,
    #[module(skip)]
    tp: TensorParallel,
    /// Whether the sequence is sharded over context-parallel ranks, which fixes its length.
    is_sharded: bool,
}

impl PositionEmbedding {
    /// A table for `num_positions` positions, for sequences of up to `seq_len`.
    pub fn build(
        builder: &Builder,
        num_positions: usize,
        seq_len: usize,
        width: usize,
        init: Init,
    ) -> Result<PositionEmbedding> {
        if seq_len > num_positions {
            return Err(NnError::SequenceTooLong {
                length: seq_len as i64,
                limit: num_positions as i64,
            });
        }
        let cp = builder.context_parallel();
        Ok(PositionEmbedding {
            weight: builder.positionwise("weight", &[num_positions, width], init)?,
            own: cp.positions(seq_len)?,
            tp: builder.tensor_parallel(),
            is_sharded: cp.size() > 1,
        })
    }

    /// Adds the position embeddings of `tokens` [batch, positions] to `x`.
    pub fn add_to(&self, x: &Tensor, tokens: &Tensor) -> Result<Tensor> {
        let (batch, length) = tokens.size2()?;
        let rows = self.rows(length)?;
        if self.tp.sequence_parallel() == SequenceParallel::Disabled {
            return Ok(x.f_add(&rows)?);
        }
        // With sequence parallelism this rank has a range of the tokens of the batch, one sequence after the other.
        let width = rows.size().last().copied().unwrap_or(1);
        let all = rows.f_expand([batch, length, width], false)?;
        let num_own = batch * length / self.tp.size() as i64;
        let all = all.f_reshape([-1, width])?;
        let own = all.f_narrow(0, self.tp.index() as i64 * num_own, num_own)?;
        Ok(x.f_add(&own.f_view_as(x)?)?)
    }

    /// The vectors of the first `length` of this rank's positions.
    fn rows(&self, length: i64) -> Result<Tensor> {
        let limit: usize = self.own.iter().map(ExactSizeIterator::len).sum();
        let limit = limit as i64;
        if length > limit || (self.is_sharded && length != limit) {
            return Err(NnError::SequenceTooLong { length, limit });
        }
        let table = self.weight.value()?;
        let intervals = self.own.iter();
        let rows = intervals.map(|own| table.f_narrow(0, own.start as i64, own.len() as i64));
        let rows = Tensor::f_cat(&rows.collect::<Result<Vec<_>, _>>()?, 0)?;
        Ok(rows.f_narrow(0, 0, length)?)
    }
}
