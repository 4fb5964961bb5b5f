//! SGD, with momentum as PyTorch has it: the learning rate is outside the running sum.

use tch::Tensor;
use trainyard_config::OptimizerSection;
use trainyard_nn::Parameter;
use trainyard_torch::kernel;

use super::Optimizer;
use super::batch::Batch;
use super::state::{Extent, Slot, State};
use crate::Result;

pub(super) const MOMENTUM: Slot = Slot {
    name: "momentum_buffer",
    extent: Extent::Parameter,
};

/// Settings of SGD.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct SgdOptions {
    /// How much of the last direction is kept; 0 keeps none, and no state.
    pub momentum: f64,
    /// Weight decay, added to the gradient.
    pub weight_decay: f64,
    /// Whether to look ahead along the momentum.
    pub nesterov: bool,
}

impl From<&OptimizerSection> for SgdOptions {
    fn from(config: &OptimizerSection) -> Self {
        SgdOptions {
            momentum: config.momentum,
            weight_decay: config.weight_decay,
            nesterov: false,
        }
    }
}

/// SGD in one kernel for all parameters.
pub struct Sgd {
    options: SgdOptions,
    state: Directions,
}

/// Without momentum there is nothing to remember.
enum Directions {
    Forgotten(State<0>),
    Kept(State<1>),
}

impl Sgd {
    /// Over these parameters.
    pub fn new(options: SgdOptions, parameters: Vec<Parameter>) -> Sgd {
        let state = if options.momentum == 0.0 {
            Directions::Forgotten(State::new([], parameters))
        } else {
            Directions::Kept(State::new([MOMENTUM], parameters))
        };
        Sgd { options, state }
    }
}

impl Optimizer for Sgd {
    fn step(&mut self, lr: f64, grad_scale: Option<&Tensor>) -> Result<()> {
        let options = kernel::Sgd {
            lr,
            momentum: self.options.momentum,
            dampening: 0.0,
            weight_decay: self.options.weight_decay,
            nesterov: self.options.nesterov,
        };
        match &mut self.state {
            Directions::Forgotten(state) => {
                state.update(|batch| update(batch, &[], &options, grad_scale))
            }
            Directions::Kept(state) => {
                state.update(|batch| update(batch, &batch.slots[0], &options, grad_scale))
            }
        }
    }

    fn kinds(&self) -> Vec<&'static str> {
        match &self.state {
            Directions::Forgotten(state) => state.kinds(),
            Directions::Kept(state) => state.kinds(),
        }
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        match &self.state {
            Directions::Forgotten(_) => Vec::new(),
            Directions::Kept(state) => state.named(),
        }
    }

    fn load_state(&mut self, saved: Vec<(String, Tensor)>) -> Result<()> {
        match &mut self.state {
            Directions::Forgotten(state) => state.load(saved),
            Directions::Kept(state) => state.load(saved),
        }
    }
}

fn update<const N: usize>(
    batch: &Batch<N>,
    momenta: &[Tensor],
    options: &kernel::Sgd,
    grad_scale: Option<&Tensor>,
) -> Result<()> {
    let scale = batch.fused_scale(grad_scale)?;
    // Without dampening a first step equals any other from a momentum of zero, so that parameters
    // may take their first steps at different times.
    let is_first_step = false;
    Ok(kernel::fused_sgd(
        &batch.parameters,
        &batch.gradients,
        momenta,
        options,
        is_first_step,
        scale.as_ref(),
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::oracle::Lab;

    /// SGD as PyTorch's documentation has it, one number at a time.
    fn reference(o: SgdOptions) -> impl FnMut(&mut [f64], &[f64], f64) {
        let mut buffer = vec![0.0; 64];
        move |w, g, lr| {
            for i in 0..w.len() {
                let decayed = g[i] + o.weight_decay * w[i];
                buffer[i] = o.momentum * buffer[i] + decayed;
                let ahead = decayed + o.momentum * buffer[i];
                w[i] -= lr * if o.nesterov { ahead } else { buffer[i] };
            }
        }
    }

    #[test]
    fn equals_the_formula() {
        for (momentum, nesterov) in [(0.0, false), (0.9, false), (0.9, true)] {
            let options = SgdOptions {
                momentum,
                nesterov,
                weight_decay: 0.05,
            };
            Lab::new().follow(
                |parameters| Sgd::new(options, parameters),
                || reference(options),
            );
        }
    }

    #[test]
    fn without_momentum_there_is_no_state() {
        let options = SgdOptions {
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.0,
        };
        let lab = Lab::new();
        let mut sgd = Sgd::new(options, lab.parameters());
        lab.set_gradients(0);
        sgd.step(0.1, None).unwrap();
        assert!(sgd.state().is_empty());
        sgd.load_state(Vec::new()).unwrap();
    }
}
