//! The norm of queries and keys.

use tch::Tensor;
use trainyard_arch::{Norm, QkNorm};
use trainyard_mesh::Dim;

use super::RmsNorm;
use crate::loss::wide;
use crate::{Builder, Init, Module, Parameter, Result, TensorParallel};

/// A norm of queries or keys [batch, positions, heads, head_dim].
#[derive(Debug)]
pub(super) enum HeadNorm {
    /// Every head by itself, all with the same scale.
    Head(RmsNorm),
    /// All heads of a token together.
    AllHeads(AllHeadsNorm),
}

impl HeadNorm {
    pub(super) fn build(
        builder: &Builder,
        (together, norm, eps): (QkNorm, Norm, f64),
        num_heads: usize,
        head_dim: usize,
    ) -> Result<HeadNorm> {
        Ok(match together {
            QkNorm::Head => HeadNorm::Head(RmsNorm::replicated(builder, head_dim, norm, eps)?),
            QkNorm::AllHeads => {
                HeadNorm::AllHeads(AllHeadsNorm::build(builder, num_heads, head_dim, eps)?)
            }
        })
    }

    pub(super) fn forward(&self, heads: &Tensor) -> Result<Tensor> {
        match self {
            HeadNorm::Head(norm) => norm.forward(heads),
            HeadNorm::AllHeads(norm) => norm.forward(heads),
        }
    }
}

impl Module for HeadNorm {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        match self {
            HeadNorm::Head(norm) => norm.visit(visitor),
            HeadNorm::AllHeads(norm) => norm.visit(visitor),
        }
    }
}

/// RMSNorm over all heads of a token, of which a tensor-parallel rank has some.
#[derive(Module, Debug)]
pub(super) struct AllHeadsNorm {
    weight: Parameter,
    width: usize,
    eps: f64,
    #[module(skip)]
    tp: TensorParallel,
}

impl AllHeadsNorm {
    fn build(
        builder: &Builder,
        num_heads: usize,
        head_dim: usize,
        eps: f64,
    ) -> Result<AllHeadsNorm> {
        let tp = builder.tensor_parallel();
        tp.shard_range("the number of normed heads", num_heads)?;
        let width = num_heads * head_dim;
        Ok(AllHeadsNorm {
            weight: builder.sharded("weight", &[width], Dim(0), Init::Ones)?,
            width,
            eps,
            tp,
        })
    }

    fn forward(&self, heads: &Tensor) -> Result<Tensor> {
        let head_dim = heads.size().last().copied().unwrap_or(1);
        let rows = heads.f_flatten(-2, -1)?.f_to_kind(wide(heads.kind()))?;
        let squares = rows
            .f_square()?
            .f_sum_dim_intlist(-1i64, true, rows.kind())?;
        let mean = self.tp.sum(&squares)?.f_div_scalar(self.width as f64)?;
        let normed = rows.f_mul(&mean.f_add_scalar(self.eps)?.f_rsqrt()?)?;
        let scaled = normed.f_mul(&self.weight.value()?)?;
        Ok(scaled
            .f_to_kind(heads.kind())?
            .f_unflatten(-1, [-1, head_dim])?)
    }
}
