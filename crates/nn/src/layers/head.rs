//! Vectors to logits.

use tch::Tensor;

use super::{Embedding, Linear};
use crate::{Builder, Init, Module, Parameter, Result, TensorParallel};

/// The map from vectors to a logit for every word: its own, or the embedding's table. Tensor-parallel
/// ranks have the logits of an interval of the words each.
#[derive(Module, Debug)]
pub struct LanguageHead {
    own: Option<Linear>,
    /// The embedding's table, which the embedding owns.
    #[module(skip)]
    tied: Option<Linear>,
    #[module(skip)]
    tp: TensorParallel,
}

impl LanguageHead {
    /// A map of its own to `num_words`.
    pub fn build(
        builder: &Builder,
        width: usize,
        num_words: usize,
        init: Init,
    ) -> Result<LanguageHead> {
        let weight = builder.words("weight", &[num_words, width], init)?;
        Ok(LanguageHead {
            own: Some(Linear::tied(weight)),
            tied: None,
            tp: builder.tensor_parallel(),
        })
    }

    /// A map that uses the table of `embedding`.
    pub fn tied(builder: &Builder, embedding: &Embedding) -> LanguageHead {
        LanguageHead {
            own: None,
            tied: Some(Linear::tied(embedding.weight().clone())),
            tp: builder.tensor_parallel(),
        }
    }

    /// This rank's logits for `x` [.., width].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.own.as_ref().or(self.tied.as_ref()) {
            Some(linear) => {
                let [logits] = self.tp.columns(x, [linear])?;
                Ok(logits)
            }
            None => Ok(x.shallow_clone()),
        }
    }

    /// The table, where it is the embedding's.
    pub fn borrowed(&self) -> Vec<Parameter> {
        self.tied.as_ref().map_or_else(Vec::new, Linear::parameters)
    }
}
