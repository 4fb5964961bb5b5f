//! Lion: the sign of interpolated momentum (Chen et al., 2023). It keeps one moment per parameter, half of AdamW's state.

use trainyard_nn::Parameter;
use trainyard_torch::kernel;

use crate::batch::Batch;
use crate::found_inf::is_set;
use crate::state::{Extent, Slot, State, delegate_state};
use crate::{DeviceScalars, Optimizer, Result};

const MOMENT: Slot = Slot {
    name: "exp_avg",
    extent: Extent::Parameter,
};

/// Hyperparameters of Lion.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct LionConfig {
    /// Weight of the moment in the update.
    pub beta1: f64,
    /// Decay of the moment.
    pub beta2: f64,
    /// Decoupled weight decay coefficient.
    pub weight_decay: f64,
}

/// The values of the paper. Its learning rates are 3 to 10 times smaller than AdamW's.
impl Default for LionConfig {
    fn default() -> LionConfig {
        LionConfig {
            beta1: 0.9,
            beta2: 0.99,
            weight_decay: 0.1,
        }
    }
}

/// Lion. Every element is updated by itself, so parameters may be sharded in any way.
pub struct Lion {
    config: LionConfig,
    state: State<1>,
}

impl Lion {
    /// A Lion optimizer for these parameters.
    pub fn new(parameters: Vec<Parameter>, config: LionConfig) -> Lion {
        Lion {
            config,
            state: State::new([MOMENT], parameters),
        }
    }
}

impl Optimizer for Lion {
    fn step_with(&mut self, lr: f64, scalars: DeviceScalars<'_>) -> Result<()> {
        if is_set(scalars.found_inf)? {
            return Ok(());
        }
        let config = self.config;
        self.state.update(|batch| {
            batch.divide_gradients(scalars.grad_scale)?;
            update(batch, lr, config)
        })
    }

    delegate_state!(state);
}

fn update(batch: &Batch<1>, lr: f64, config: LionConfig) -> Result<()> {
    let (parameters, gradients, [moments]) = (&batch.parameters, &batch.gradients, &batch.slots);
    let mut signs = Vec::with_capacity(parameters.len());
    for (moment, gradient) in moments.iter().zip(gradients) {
        signs.push(moment.f_lerp(gradient, 1.0 - config.beta1)?.f_sign()?);
    }
    kernel::foreach_mul_(parameters, 1.0 - lr * config.weight_decay)?;
    kernel::foreach_add_(parameters, &signs, -lr)?;
    kernel::foreach_mul_(moments, config.beta2)?;
    Ok(kernel::foreach_add_(
        moments,
        gradients,
        1.0 - config.beta2,
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    /// Lion as in the paper, element by element.
    fn reference(o: LionConfig) -> impl FnMut(&mut [f64], &[f64], f64) {
        let mut moment = vec![0.0; 64];
        move |w, g, lr| {
            for i in 0..w.len() {
                let update = o.beta1 * moment[i] + (1.0 - o.beta1) * g[i];
                let sign = if update == 0.0 { 0.0 } else { update.signum() };
                w[i] -= lr * (sign + o.weight_decay * w[i]);
                moment[i] = o.beta2 * moment[i] + (1.0 - o.beta2) * g[i];
            }
        }
    }

    #[test]
    fn equals_the_formula() {
        let config = LionConfig::default();
        Fixture::new().assert_follows(
            |parameters| Lion::new(parameters, config),
            || reference(config),
        );
    }
}
