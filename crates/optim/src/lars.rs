//! LARS: SGD with layer-wise trust ratios, for large batches (You et al., 2017).
//!
//! The momentum buffer does not contain the learning rate, as in [`super::Sgd`].

use tch::Tensor;
use trainyard_nn::Parameter;
use trainyard_torch::{World, kernel};

use crate::found_inf::is_set;
use crate::sgd::MOMENTUM;
use crate::shard_groups::ShardGroups;
use crate::state::{State, delegate_state};
use crate::trust::{elements, full_norms, ratio_or_one, zero_norms};
use crate::{DeviceScalars, Optimizer, Result};

/// Hyperparameters of LARS.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct LarsConfig {
    /// Momentum coefficient.
    pub momentum: f64,
    /// Weight decay coefficient, added to the gradient (L2).
    pub weight_decay: f64,
    /// The trust coefficient: norm of an update relative to the norm of the parameter.
    pub trust_coefficient: f64,
    /// Added to the denominator for numerical stability.
    pub eps: f64,
}

/// Values of the paper.
impl Default for LarsConfig {
    fn default() -> LarsConfig {
        LarsConfig {
            momentum: 0.9,
            weight_decay: 1e-4,
            trust_coefficient: 1e-3,
            eps: 1e-8,
        }
    }
}

/// LARS, as `foreach` operations on all parameters of a dtype. Norms are those of full parameters, over the ranks that
/// hold their shards.
pub struct Lars {
    config: LarsConfig,
    state: State<1>,
    shards: ShardGroups,
}

impl Lars {
    /// A LARS optimizer for these parameters, which may be sharded over ranks of `world`.
    pub fn new(parameters: Vec<Parameter>, config: LarsConfig, world: &World) -> Result<Lars> {
        Ok(Lars {
            config,
            shards: ShardGroups::new(&parameters, world)?,
            state: State::new([MOMENTUM], parameters),
        })
    }
}

impl Optimizer for Lars {
    fn step_with(&mut self, lr: f64, scalars: DeviceScalars<'_>) -> Result<()> {
        if is_set(scalars.found_inf)? {
            return Ok(());
        }
        let (config, shards) = (self.config, &self.shards);
        let zeros = zero_norms(self.state.parameters())?;
        self.state.update_together(|batches| {
            let mut gradients = Vec::with_capacity(batches.len());
            for batch in batches {
                batch.divide_gradients(scalars.grad_scale)?;
                gradients.push(batch.gradients.iter().map(Tensor::shallow_clone).collect());
            }
            let norms = full_norms(batches, &gradients, shards, zeros)?;
            for (batch, [weights, gradients]) in batches.iter().zip(norms) {
                let trust = trust(&weights, &gradients, &config)?;
                let trust = elements(&trust, batch.kind)?;
                let (parameters, [momenta]) = (&batch.parameters, &batch.slots);
                kernel::foreach_mul_(momenta, config.momentum)?;
                kernel::foreach_addcmul_(momenta, &batch.gradients, &trust, 1.0)?;
                kernel::foreach_addcmul_(momenta, parameters, &trust, config.weight_decay)?;
                kernel::foreach_add_(parameters, momenta, -lr)?;
            }
            Ok(())
        })
    }

    delegate_state!(state);
}

/// `coefficient * |w| / (|g| + weight_decay * |w| + eps)` for each parameter.
fn trust(weights: &Tensor, gradients: &Tensor, config: &LarsConfig) -> Result<Tensor> {
    let decay = weights.f_mul_scalar(config.weight_decay)?;
    let denominator = gradients.f_add(&decay)?.f_add_scalar(config.eps)?;
    ratio_or_one(
        &weights.f_mul_scalar(config.trust_coefficient)?,
        &denominator,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Fixture, norm, one_rank};

    const CONFIG: LarsConfig = LarsConfig {
        momentum: 0.9,
        weight_decay: 0.01,
        trust_coefficient: 1e-3,
        eps: 1e-8,
    };

    /// LARS as in the paper, element by element.
    fn reference() -> impl FnMut(&mut [f64], &[f64], f64) {
        let mut buffer = vec![0.0; 64];
        let o = CONFIG;
        move |w, g, lr| {
            let (w_norm, g_norm) = (norm(w), norm(g));
            let denominator = g_norm + o.weight_decay * w_norm + o.eps;
            let trust = if w_norm > 0.0 && denominator > 0.0 {
                o.trust_coefficient * w_norm / denominator
            } else {
                1.0
            };
            for i in 0..w.len() {
                buffer[i] = o.momentum * buffer[i] + trust * (g[i] + o.weight_decay * w[i]);
                w[i] -= lr * buffer[i];
            }
        }
    }

    #[test]
    fn equals_the_formula() {
        Fixture::new().assert_follows(
            |parameters| Lars::new(parameters, CONFIG, &one_rank()).unwrap(),
            reference,
        );
    }
}
