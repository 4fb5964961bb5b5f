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
    vocab_size: usize,
    /// The number of chunks in which the loss is computed; 1 if the head returns logits.
    num_loss_chunks: usize,
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
            vocab_size,
            num_loss_chunks: builder.num_loss_chunks(),
            tp: builder.tensor_parallel(),
        })
    }

    /// A head tied to the table of `embedding`.
    pub fn tied(builder: &Builder, embedding: &Embedding) -> LmHead {
        LmHead {
            own: None,
            tied: Some(Linear::from_weight(embedding.weight().clone())),
            vocab_size: embedding.num_rows(),
            num_loss_chunks: builder.num_loss_chunks(),
            tp: builder.tensor_parallel(),
        }
    }

    /// This rank's logits for `x` [.., width]; if it computes the loss in chunks and there are `targets`, the loss
    /// summed over them.
    pub fn forward(&self, x: &Tensor, targets: Option<&Tensor>) -> Result<Tensor> {
        let Some(linear) = self.own.as_ref().or(self.tied.as_ref()) else {
            return Ok(x.shallow_clone());
        };
        match targets.filter(|_| self.num_loss_chunks > 1) {
            Some(targets) => {
                let (weight, num_classes) = (linear.value()?, self.vocab_size);
                self.tp.chunked_cross_entropy_sum(
                    x,
                    &weight,
                    targets,
                    num_classes,
                    self.num_loss_chunks,
                )
            }
            None => {
                let [logits] = self.tp.colwise(x, [linear])?;
                Ok(logits)
            }
        }
    }

    /// The embedding table, if the head is tied.
    pub fn tied_parameters(&self) -> Vec<Parameter> {
        self.tied.as_ref().map_or_else(Vec::new, Linear::parameters)
    }
}
