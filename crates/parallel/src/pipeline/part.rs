//! Some units of a model, as a model of their own.

use std::ops::Range;
use std::rc::Rc;

use tch::Tensor;
use trainyard_nn::{Model, Module, Parameter, Unit};

/// A run of units. The rest of the model may be without memory: it is never asked.
pub struct Part {
    model: Rc<dyn Model>,
    units: Range<usize>,
    copies: Vec<Parameter>,
}

impl Part {
    /// These units of `model`.
    pub fn new(model: Rc<dyn Model>, units: Range<usize>) -> Part {
        Part {
            model,
            units,
            copies: Vec::new(),
        }
    }

    /// The same with parameters that another rank's unit owns and this one has a copy of.
    #[must_use]
    pub fn with_copies(self, copies: Vec<Parameter>) -> Part {
        Part { copies, ..self }
    }
}

impl Module for Part {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        for unit in self.units() {
            unit.visit(visitor);
        }
        self.copies.iter().for_each(visitor);
    }
}

impl Model for Part {
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

    fn sent_by_layers(&self, num_tokens: u64) -> u64 {
        self.model.sent_by_layers(num_tokens)
    }
}
