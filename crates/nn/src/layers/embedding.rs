//! A row of a table for every token.

use tch::Tensor;

use crate::{Builder, Init, Module, Parameter, Result};

/// A table of vectors, looked up by token.
#[derive(Module, Debug)]
pub struct Embedding {
    weight: Parameter,
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
            weight: builder.parameter("weight", &[num_rows, width], init)?,
        })
    }

    /// The table, to be tied to a head.
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }

    /// The vectors of `tokens`, in the compute kind.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        const NO_PADDING: i64 = -1;
        // Rows are cast after the lookup: there are fewer of them than the table has.
        let rows = Tensor::f_embedding(self.weight.tensor(), tokens, NO_PADDING, false, false)?;
        self.weight.as_computed(&rows)
    }
}
