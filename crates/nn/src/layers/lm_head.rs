//! The language-model head.

use tch::Tensor;

use super::{Embedding, Linear};
use crate::{Builder, Init, Module, Parameter, Result, TensorParallel};

/// The projection from hidden states to logits, with its own weight or the embedding table. Tensor-parallel ranks
/// have the logits of a range of the vocabulary each.
#[derive(Module, Debug)]
pub struct LmHead {
    own: Option<Linear>,
    /// The embedding table, which the embedding owns.
    #[module(skip)]
    tied: Option<Linear>,
    #[module(skip)]
    tp: TensorParallel,
}

impl LmHead {
    /// A head with its own weight for `vocab_size` vocabulary entries.
    pub fn build(builder: &Builder, width: usize, vocab_size: usize, init: Init) -> Result<LmHead> {
        let weight = builder.vocab_sharded("weight", &[vocab_size, width], init)?;
        Ok(LmHead {
            own: Some(Linear::from_weight(weight)),
            tied: None,
            tp: builder.tensor_parallel(),
        })
    }

    /// A head tied to the table of `embedding`.
    pub fn tied(builder: &Builder, embedding: &Embedding) -> LmHead {
        LmHead {
            own: None,
            tied: Some(Linear::from_weight(embedding.weight().clone())),
            tp: builder.tensor_parallel(),
        }
    }

    /// This rank's logits for `x` [.., width].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.own.as_ref().or(self.tied.as_ref()) {
            Some(linear) => {
                let [logits] = self.tp.colwise(x, [linear])?;
                Ok(logits)
            }
            None => Ok(x.shallow_clone()),
        }
    }

    /// The embedding table, if the head is tied.
    pub fn tied_parameters(&self) -> Vec<Parameter> {
        self.tied.as_ref().map_or_else(Vec::new, Linear::parameters)
    }
}
