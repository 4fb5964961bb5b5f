//! A stage of a pipeline: consecutive units of a model, as a model of their own.

use std::ops::Range;
use std::rc::Rc;

use tch::Tensor;
use trainyard_nn::{Model, Module, Parameter, Unit};

/// Consecutive units of a model. The other units are never run and may be on the meta device.
pub struct StageModel {
    model: Rc<dyn Model>,
    units: Range<usize>,
    tied: Vec<Parameter>,
}

impl StageModel {
    /// The stage with these units of `model`.
    pub fn new(model: Rc<dyn Model>, units: Range<usize>) -> StageModel {
        StageModel {
            model,
            units,
            tied: Vec::new(),
        }
    }

    /// Adds parameters that are tied to those of a stage on another rank, and replicated here.
    #[must_use]
    pub fn with_tied_parameters(self, tied: Vec<Parameter>) -> StageModel {
        StageModel { tied, ..self }
    }
}

impl Module for StageModel {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        for unit in self.units() {
            unit.visit(visitor);
        }
        self.tied.iter().for_each(visitor);
    }
}

impl Model for StageModel {
    fn units(&self) -> Vec<&dyn Unit> {
        let units = self.model.units().into_iter();
        units
            .skip(self.units.start)
            .take(self.units.len())
            .collect()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> trainyard_nn::Result<Tensor> {
        self.model.loss(output, targets)
    }

    fn layer_comm_bytes(&self, num_tokens: u64) -> Option<u64> {
        self.model.layer_comm_bytes(num_tokens)
    }
}
