//! Token embeddings.

use tch::Tensor;

use crate::{Builder, Init, Module, Parameter, Result, TensorParallel};

/// An embedding table. Tensor-parallel ranks have a range of its rows each (vocabulary parallelism).
#[derive(Module, Debug)]
pub struct Embedding {
    weight: Parameter,
    num_rows: usize,
    #[module(skip)]
    tp: TensorParallel,
}

impl Embedding {
    /// A table of `num_rows` vectors.
    pub fn build(
        builder: &Builder,
        num_rows: usize,
        width: usize,
        init: Init,
    ) -> Result<Embedding> {
        Ok(Embedding {
            weight: builder.vocab_sharded("weight", &[num_rows, width], init)?,
            num_rows,
            tp: builder.tensor_parallel(),
        })
    }

    /// The table, to tie a head to.
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }

    /// The number of rows of the table, on all ranks together.
    pub(crate) fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// The embeddings of `tokens`, in the compute dtype.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        // Cast after the lookup, because there are fewer looked-up rows than rows of the table.
        let rows = self
            .tp
            .embedding(self.weight.tensor(), tokens, self.num_rows)?;
        self.tp.reduce_output(&self.weight.to_compute_kind(&rows)?)
    }
}
