//! A unit: the part of a model that strategies handle as one.
//!
//! Parameters are gathered and released by unit, activations recomputed by unit, pipelines cut
//! between units. A Llama's units are its embedding, each of its blocks, and its head.

use std::rc::Rc;

use tch::Tensor;

use crate::{Documents, Module, Parameter, Result, Router};

/// What a forward pass knows beside its input.
#[derive(Clone, Debug, PartialEq)]
pub struct Context {
    /// The step of training, from zero.
    pub step: u64,
    /// Which sample of the step's global batch the input begins with.
    pub first_sample: u64,
    /// Whether the model is trained, rather than evaluated.
    pub training: bool,
    /// Whether attention keeps its input alone and is computed again in backward.
    pub recompute_attention: bool,
    /// The documents that attention keeps apart; none where a sequence is one.
    pub documents: Option<Documents>,
    /// What the loss that backward begins with multiplies a sum over positions by, for layers that add a
    /// loss of their own.
    pub loss_weight: Option<f64>,
}

impl Context {
    /// The context of a training step.
    pub fn training(step: u64) -> Context {
        Context {
            step,
            first_sample: 0,
            training: true,
            recompute_attention: false,
            documents: None,
            loss_weight: None,
        }
    }

    /// The same for an input that begins with another sample of the step's global batch.
    #[must_use]
    pub fn at_sample(self, first_sample: u64) -> Context {
        Context {
            first_sample,
            ..self
        }
    }

    /// The same for an input whose documents attention keeps apart.
    #[must_use]
    pub fn with_documents(self, documents: Option<Documents>) -> Context {
        Context { documents, ..self }
    }

    /// The same for a loss that multiplies a sum over positions by `weight`.
    #[must_use]
    pub fn with_loss_weight(self, weight: f64) -> Context {
        Context {
            loss_weight: Some(weight),
            ..self
        }
    }

    /// The context of an evaluation.
    pub fn evaluation(step: u64) -> Context {
        Context {
            step,
            first_sample: 0,
            training: false,
            recompute_attention: false,
            documents: None,
            loss_weight: None,
        }
    }
}

/// A named part of a model whose only input is the output of the part before it.
pub trait Unit: Module {
    /// The name, unique in the model.
    fn name(&self) -> &str;

    /// The output for `x`.
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor>;

    /// Parameters it computes with that another unit owns: a tied head's table.
    fn borrowed(&self) -> Vec<Parameter> {
        Vec::new()
    }

    /// What sends its tokens to experts, if it has any.
    fn router(&self) -> Option<&Router> {
        None
    }
}

/// One passage of one run through one unit, as strategies see it.
///
/// It outlives the forward pass, since backward speaks of it again; so it names the unit instead of
/// borrowing it. A strategy finds what it keeps for the unit by `index`.
#[derive(Clone, Debug)]
pub struct UnitCall {
    /// Which run of the model, unique in this process; several may be under way (micro-batches).
    pub run: u64,
    /// Which of the model's units, from zero.
    pub index: usize,
    /// How many units the model has.
    pub num_units: usize,
    /// The unit's name.
    pub name: Rc<str>,
    /// The context of the forward pass.
    pub context: Context,
}

impl UnitCall {
    /// Whether backward begins here.
    pub fn is_last(&self) -> bool {
        self.index + 1 == self.num_units
    }
}
