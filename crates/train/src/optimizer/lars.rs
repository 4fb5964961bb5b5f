//! LARS: SGD with layer-wise trust ratios, for large batches (You et al., 2017).
//!
//! The momentum buffer does not contain the learning rate, as in [`super::Sgd`].

use tch::Tensor;
use trainyard_config::OptimizerSection;
use trainyard_nn::Parameter;
use trainyard_torch::kernel;

use super::batch::Batch;
use super::sgd::MOMENTUM;
use super::state::State;
use super::trust::{elements, is_set, norms, ratio_or_one};
use super::{DeviceScalars, Optimizer};
use crate::Result;

/// Hyperparameters of LARS.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct LarsOptions {
    /// Momentum coefficient.
    pub momentum: f64,
    /// Weight decay coefficient, added to the gradient (L2).
    pub weight_decay: f64,
    /// The trust coefficient: norm of an update relative to the norm of the parameter.
    pub trust_coefficient: f64,
    /// Added to the denominator for numerical stability.
    pub eps: f64,
}

impl From<&OptimizerSection> for LarsOptions {
    fn from(config: &OptimizerSection) -> Self {
        LarsOptions {
            momentum: config.momentum,
            weight_decay: config.weight_decay,
            // The value of the paper.
            trust_coefficient: 1e-3,
            eps: config.eps,
        }
    }
}

/// LARS, as `foreach` operations on all parameters of a dtype.
pub struct Lars {
    options: LarsOptions,
    state: State<1>,
}

impl Lars {
    /// A LARS optimizer for these parameters.
    pub fn new(options: LarsOptions, parameters: Vec<Parameter>) -> Lars {
        Lars {
            options,
            state: State::new([MOMENTUM], parameters),
        }
    }
}

impl Optimizer for Lars {
    fn step_with(&mut self, lr: f64, scalars: DeviceScalars<'_>) -> Result<()> {
        if is_set(scalars.found_inf)? {
            return Ok(());
        }
        let options = self.options;
        self.state.update(|batch| {
            batch.divide_gradients(scalars.grad_scale)?;
            let trust = elements(&trust(batch, &options)?, batch.kind)?;
            let (parameters, [momenta]) = (&batch.parameters, &batch.slots);
            kernel::foreach_mul_(momenta, options.momentum)?;
            kernel::foreach_addcmul_(momenta, &batch.gradients, &trust, 1.0)?;
            kernel::foreach_addcmul_(momenta, parameters, &trust, options.weight_decay)?;
            Ok(kernel::foreach_add_(parameters, momenta, -lr)?)
        })
    }

    fn kinds(&self) -> Vec<&'static str> {
        self.state.kinds()
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        self.state.named()
    }

    fn load_state(&mut self, state: Vec<(String, Tensor)>) -> Result<()> {
        self.state.load(state)
    }
}

/// `coefficient * |w| / (|g| + weight_decay * |w| + eps)` for each parameter.
fn trust(batch: &Batch<1>, options: &LarsOptions) -> Result<Tensor> {
    let weights = norms(&batch.parameters)?;
    let gradients = norms(&batch.gradients)?;
    let decay = weights.f_mul_scalar(options.weight_decay)?;
    let denominator = gradients.f_add(&decay)?.f_add_scalar(options.eps)?;
    ratio_or_one(
        &weights.f_mul_scalar(options.trust_coefficient)?,
        &denominator,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::fixture::{Fixture, norm};

    const OPTIONS: LarsOptions = LarsOptions {
        momentum: 0.9,
        weight_decay: 0.01,
        trust_coefficient: 1e-3,
        eps: 1e-8,
    };

    /// LARS as in the paper, element by element.
    fn reference() -> impl FnMut(&mut [f64], &[f64], f64) {
        let mut buffer = vec![0.0; 64];
        let o = OPTIONS;
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
        Fixture::new().assert_follows(|parameters| Lars::new(OPTIONS, parameters), reference);
    }
}
