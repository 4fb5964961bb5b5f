//! A row of a table for every token.

use tch::Tensor;

use crate::{Builder, Init, Module, Parameter, Result, TensorParallel};

/// A table of vectors, looked up by token. Tensor-parallel ranks have an interval of its rows each.
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
            weight: builder.words("weight", &[num_rows, width], init)?,
            num_rows,
            tp: builder.tensor_parallel(),
        })
    }

    /// The table, to be tied to a head.
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }

    /// The vectors of `tokens`, in the compute kind.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        // Rows are cast after the lookup: there are fewer of them than the table has.
        let rows = self
            .tp
            .look_up(self.weight.tensor(), tokens, self.num_rows)?;
        self.tp.add_up(&self.weight.as_computed(&rows)?)
    }
}
