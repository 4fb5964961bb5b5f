//! SGD with momentum as in PyTorch: the momentum buffer does not contain the learning rate.

use tch::Tensor;
use trainyard_nn::Parameter;
use trainyard_torch::kernel;

use crate::batch::Batch;
use crate::state::{Extent, Slot, State};
use crate::{DeviceScalars, Optimizer, Result};

pub(crate) const MOMENTUM: Slot = Slot {
    name: "momentum_buffer",
    extent: Extent::Parameter,
};

/// Hyperparameters of SGD.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct SgdConfig {
    /// Momentum coefficient; with 0 there is no state.
    pub momentum: f64,
    /// Weight decay coefficient, added to the gradient (L2).
    pub weight_decay: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
}

/// SGD, as one fused kernel for all parameters of a dtype.
pub struct Sgd {
    config: SgdConfig,
    state: Momentum,
}

/// SGD without momentum has no state tensors.
enum Momentum {
    None(State<0>),
    Buffer(State<1>),
}

impl Sgd {
    /// An SGD optimizer for these parameters.
    pub fn new(parameters: Vec<Parameter>, config: SgdConfig) -> Sgd {
        let state = if config.momentum == 0.0 {
            Momentum::None(State::new([], parameters))
        } else {
            Momentum::Buffer(State::new([MOMENTUM], parameters))
        };
        Sgd { config, state }
    }
}

impl Optimizer for Sgd {
    fn step_with(&mut self, lr: f64, scalars: DeviceScalars<'_>) -> Result<()> {
        let config = kernel::Sgd {
            lr,
            momentum: self.config.momentum,
            dampening: 0.0,
            weight_decay: self.config.weight_decay,
            nesterov: self.config.nesterov,
        };
        match &mut self.state {
            Momentum::None(state) => state.update(|batch| update(batch, &[], &config, scalars)),
            Momentum::Buffer(state) => {
                state.update(|batch| update(batch, &batch.slots[0], &config, scalars))
            }
        }
    }

    fn kinds(&self) -> Vec<&'static str> {
        match &self.state {
            Momentum::None(state) => state.kinds(),
            Momentum::Buffer(state) => state.kinds(),
        }
    }

    fn num_moments(&self, _: &Parameter) -> u64 {
        match &self.state {
            Momentum::None(_) => 0,
            Momentum::Buffer(state) => state.num_moments(),
        }
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        match &self.state {
            Momentum::None(_) => Vec::new(),
            Momentum::Buffer(state) => state.named(),
        }
    }

    fn load_state(&mut self, saved: Vec<(String, Tensor)>) -> Result<()> {
        match &mut self.state {
            Momentum::None(state) => state.load(saved),
            Momentum::Buffer(state) => state.load(saved),
        }
    }

    fn clear_state(&mut self) {
        match &mut self.state {
            Momentum::None(state) => state.clear(),
            Momentum::Buffer(state) => state.clear(),
        }
    }
}

fn update<const N: usize>(
    batch: &Batch<N>,
    momenta: &[Tensor],
    config: &kernel::Sgd,
    scalars: DeviceScalars<'_>,
) -> Result<()> {
    let scale = batch.fused_scale(scalars.grad_scale)?;
    // Without dampening the first step equals a later one with a momentum buffer of zeros, so parameters
    // may take their first steps at different times.
    let is_first_step = false;
    Ok(kernel::fused_sgd(
        &batch.parameters,
        &batch.gradients,
        momenta,
        config,
        is_first_step,
        DeviceScalars {
            grad_scale: scale.as_ref(),
            ..scalars
        },
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    /// SGD as in the PyTorch documentation, element by element.
    fn reference(o: SgdConfig) -> impl FnMut(&mut [f64], &[f64], f64) {
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
            let config = SgdConfig {
                momentum,
                nesterov,
                weight_decay: 0.05,
            };
            Fixture::new().assert_follows(
                |parameters| Sgd::new(parameters, config),
                || reference(config),
            );
        }
    }

    #[test]
    fn without_momentum_there_is_no_state() {
        let config = SgdConfig {
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.0,
        };
        let fixture = Fixture::new();
        let mut sgd = Sgd::new(fixture.parameters(), config);
        fixture.set_gradients(0);
        sgd.step(0.1).unwrap();
        assert!(sgd.state().is_empty());
        sgd.load_state(Vec::new()).unwrap();
    }
}
