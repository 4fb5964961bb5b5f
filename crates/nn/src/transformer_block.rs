//! What all decoders share: blocks of two halves with residual connections, and the head.

use std::fmt::Debug;
use std::rc::Rc;

use tch::Tensor;

use crate::layers::{Dropout, Embedding, LayerNorm, LmHead, RmsNorm};
use crate::{
    Builder, Context, Documents, Init, Module, Parameter, Result, Router, Unit, recompute,
};

/// The attention half of a block, with its norms.
pub(crate) trait AttentionHalf: Module + Debug + 'static {
    /// What it adds to `x` [batch, positions, width], with document masking if `documents` is given.
    fn forward(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor>;
}

/// The feed-forward half of a block, with its norms.
pub(crate) trait FeedForwardHalf: Module + Debug {
    /// What it adds to `x`.
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor>;

    /// The router of its experts, if it has some.
    fn router(&self) -> Option<&Router> {
        None
    }
}

/// A norm of the residual stream.
pub(crate) trait Norm: Module + Debug {
    /// `x`, normalized.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;
}

impl Norm for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        RmsNorm::forward(self, x)
    }
}

impl Norm for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        LayerNorm::forward(self, x)
    }
}

/// A transformer block: attention and a feed-forward layer with residual connections.
#[derive(Module, Debug)]
pub(crate) struct TransformerBlock<A, F> {
    name: String,
    /// Shared with backward, which may recompute it.
    attention: Rc<A>,
    mlp: F,
    /// Dropout of the outputs of attention and of the feed-forward layer.
    #[module(skip)]
    dropouts: Option<[Dropout; 2]>,
}

impl<A: AttentionHalf, F: FeedForwardHalf> TransformerBlock<A, F> {
    /// A block of two halves, named as the builder's path.
    pub(crate) fn new(
        builder: &Builder,
        attention: A,
        mlp: F,
        dropouts: Option<[Dropout; 2]>,
    ) -> TransformerBlock<A, F> {
        TransformerBlock {
            name: builder.path().to_owned(),
            attention: Rc::new(attention),
            mlp,
            dropouts,
        }
    }

    /// Applies dropout to the output of one half of the block.
    fn dropout(&self, half: usize, output: Tensor, cx: &Context) -> Result<Tensor> {
        match &self.dropouts {
            Some(dropouts) => dropouts[half].forward(&output, cx),
            None => Ok(output),
        }
    }
}

impl<A: AttentionHalf, F: FeedForwardHalf> Unit for TransformerBlock<A, F> {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        let documents = cx.documents.clone();
        let attended = if cx.recompute_attention {
            let attention = Rc::clone(&self.attention);
            let again = move |x: &Tensor| attention.forward(x, documents.as_ref());
            recompute(x, Rc::new(again))?
        } else {
            self.attention.forward(x, documents.as_ref())?
        };
        let x = x.f_add(&self.dropout(0, attended, cx)?)?;
        let fed = self.mlp.forward(&x, cx)?;
        Ok(x.f_add(&self.dropout(1, fed, cx)?)?)
    }

    fn router(&self) -> Option<&Router> {
        self.mlp.router()
    }
}

/// The head unit: the final norm and the LM head.
#[derive(Module, Debug)]
pub(crate) struct Head<N> {
    name: String,
    norm: N,
    lm_head: LmHead,
}

impl<N: Norm> Head<N> {
    /// A head of `vocab_size` outputs, tied to `embedding` if it is given.
    pub(crate) fn build(
        root: &Builder,
        norm: N,
        [width, vocab_size]: [usize; 2],
        tied: Option<&Embedding>,
        init: Init,
    ) -> Result<Head<N>> {
        let builder = root.push("lm_head");
        Ok(Head {
            name: builder.path().to_owned(),
            norm,
            lm_head: match tied {
                Some(embedding) => LmHead::tied(&builder, embedding),
                None => LmHead::build(&builder, width, vocab_size, init)?,
            },
        })
    }
}

impl<N: Norm> Unit for Head<N> {
    fn name(&self) -> &str {
        &self.name
    }

    /// The logits, or the loss summed over the targets of `cx`, if the head computes it.
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        let targets = cx.targets.as_deref();
        self.lm_head.forward(&self.norm.forward(x)?, targets)
    }

    fn tied_parameters(&self) -> Vec<Parameter> {
        self.lm_head.tied_parameters()
    }
}
