//! A unit: the part of a model that strategies treat as a whole.
//!
//! Strategies gather and release parameters by unit, recompute activations by unit, and split pipelines between
//! units. The units of a Llama are its embedding, each of its blocks, and its head.

use std::rc::Rc;

use tch::Tensor;

use crate::{Documents, Module, Parameter, Result, Router};

/// The inputs of a forward pass besides the tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Context {
    /// The training step, from 0.
    pub step: u64,
    /// The index of the input's first sample in the step's global batch.
    pub first_sample: u64,
    /// Whether the model is in training mode, not in evaluation mode.
    pub training: bool,
    /// Whether attention saves only its input and is recomputed in backward.
    pub recompute_attention: bool,
    /// The documents of the batch, for document masking; `None` if each sequence is one document.
    pub documents: Option<Documents>,
    /// The factor that the loss applies to a sum over tokens. Layers that add an auxiliary loss need it.
    pub loss_weight: Option<f64>,
    /// The targets of the batch, for a head that computes the loss itself.
    pub targets: Option<Rc<Tensor>>,
    /// Whether this rank has no more batches and only takes part in the passes of others, with a batch that it has seen
    /// before and a loss of no weight. Layers that count what they have seen leave it out.
    pub is_idle: bool,
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
            targets: None,
            is_idle: false,
        }
    }

    /// The same context for an input that starts with another sample of the global batch.
    #[must_use]
    pub fn at_sample(self, first_sample: u64) -> Context {
        Context {
            first_sample,
            ..self
        }
    }

    /// The same context with document masking.
    #[must_use]
    pub fn with_documents(self, documents: Option<Documents>) -> Context {
        Context { documents, ..self }
    }

    /// The same context for a loss that multiplies a sum over tokens by `weight`.
    #[must_use]
    pub fn with_loss_weight(self, weight: f64) -> Context {
        Context {
            loss_weight: Some(weight),
            ..self
        }
    }

    /// The same context with the targets of the batch.
    #[must_use]
    pub fn with_targets(self, targets: &Tensor) -> Context {
        Context {
            targets: Some(Rc::new(targets.shallow_clone())),
            ..self
        }
    }

    /// The context of an evaluation step.
    pub fn evaluation(step: u64) -> Context {
        Context {
            step,
            first_sample: 0,
            training: false,
            recompute_attention: false,
            documents: None,
            loss_weight: None,
            targets: None,
            is_idle: false,
        }
    }
}

/// A named part of a model whose only input is the output of the previous part.
pub trait Unit: Module {
    /// The unit's name, unique in the model.
    fn name(&self) -> &str;

    /// The output for `x`.
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor>;

    /// The path of its type, which a policy may choose it by.
    fn type_name(&self) -> &'static str {
        std::any::type_name::<Self>()
    }

    /// Parameters that this unit uses and another unit owns, such as the embedding table of a tied head.
    fn tied_parameters(&self) -> Vec<Parameter> {
        Vec::new()
    }

    /// Embedding tables of which this unit reads the rows that its input names, and no others. Parameter servers ask the first unit of a
    /// model, whose input is the samples. A table that another unit reads too must be among its
    /// [`tied_parameters`](Unit::tied_parameters).
    fn lookup_tables(&self) -> Vec<Parameter> {
        Vec::new()
    }

    /// The unit's MoE router, if it has one.
    fn router(&self) -> Option<&Router> {
        None
    }
}

/// One call of one unit in one run, as hooks see it.
///
/// The value outlives the forward pass, because backward hooks receive it too; so it holds the unit's name and not a
/// reference. A strategy finds its state of the unit by `index`.
#[derive(Clone, Debug)]
pub struct UnitCall {
    /// The id of the run, unique in this process; several runs (micro-batches) may be in flight.
    pub run: u64,
    /// The index of the unit in the model, from 0.
    pub index: usize,
    /// The number of units of the model.
    pub num_units: usize,
    /// The unit's name.
    pub name: Rc<str>,
    /// The context of the forward pass.
    pub context: Context,
}

impl UnitCall {
    /// Whether this is the last unit, where backward starts.
    pub fn is_last(&self) -> bool {
        self.index + 1 == self.num_units
    }
}
