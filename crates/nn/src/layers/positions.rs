//! Positions as vectors that are learnt.

use std::ops::Range;

use tch::Tensor;

use crate::{Builder, Init, Module, NnError, Parameter, Result, Sequence, TensorParallel};

/// A table with a vector for every position, added to what lies there.
#[derive(Module, Debug)]
pub struct Positions {
    weight: Parameter,
    /// Those this rank has of every sequence, in the order in which it has them.
    #[module(skip)]
    own: Vec<Range<usize>>,
    #[module(skip)]
    tp: TensorParallel,
    /// Whether other ranks have other positions of the same sequences, which have one length then.
    is_shared: bool,
}

impl Positions {
    /// A table for `num_positions`, to be used for sequences of up to `seq_len`.
    pub fn build(
        builder: &Builder,
        num_positions: usize,
        seq_len: usize,
        width: usize,
        init: Init,
    ) -> Result<Positions> {
        if seq_len > num_positions {
            return Err(NnError::SequenceTooLong {
                length: seq_len as i64,
                limit: num_positions as i64,
            });
        }
        let cp = builder.context_parallel();
        Ok(Positions {
            weight: builder.positionwise("weight", &[num_positions, width], init)?,
            own: cp.positions(seq_len)?,
            tp: builder.tensor_parallel(),
            is_shared: cp.size() > 1,
        })
    }

    /// `x`, which lies at the positions of `tokens` [batch, positions], with their vectors added.
    pub fn added(&self, x: &Tensor, tokens: &Tensor) -> Result<Tensor> {
        let (batch, length) = tokens.size2()?;
        let rows = self.rows(length)?;
        if self.tp.sequence() == Sequence::Whole {
            return Ok(x.f_add(&rows)?);
        }
        // This rank has an interval of the tokens of the batch, one sequence after the other.
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
        if length > limit || (self.is_shared && length != limit) {
            return Err(NnError::SequenceTooLong { length, limit });
        }
        let table = self.weight.value()?;
        let intervals = self.own.iter();
        let rows = intervals.map(|own| table.f_narrow(0, own.start as i64, own.len() as i64));
        let rows = Tensor::f_cat(&rows.collect::<Result<Vec<_>, _>>()?, 0)?;
        Ok(rows.f_narrow(0, 0, length)?)
    }
}
