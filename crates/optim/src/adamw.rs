//! AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

use trainyard_nn::Parameter;
use trainyard_torch::kernel;

use crate::batch::Batch;
use crate::state::{Extent, Slot, State, delegate_state};
use crate::{DeviceScalars, Optimizer, Result};

/// State per parameter: first moment, second moment, step count.
pub(crate) const MOMENTS: [Slot; 3] = [
    Slot {
        name: "exp_avg",
        extent: Extent::Parameter,
    },
    Slot {
        name: "exp_avg_sq",
        extent: Extent::Parameter,
    },
    Slot {
        name: "step",
        extent: Extent::Scalar,
    },
];

/// Hyperparameters of AdamW and LAMB.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator for numerical stability.
    pub eps: f64,
    /// Decoupled weight decay coefficient.
    pub weight_decay: f64,
}

/// The values of `torch.optim.AdamW`.
impl Default for AdamWConfig {
    fn default() -> AdamWConfig {
        AdamWConfig {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
        }
    }
}

/// AdamW, as one fused kernel for all parameters of a dtype.
pub struct AdamW {
    config: AdamWConfig,
    state: State<3>,
}

impl AdamW {
    /// An AdamW optimizer for these parameters.
    pub fn new(parameters: Vec<Parameter>, config: AdamWConfig) -> AdamW {
        AdamW {
            config,
            state: State::new(MOMENTS, parameters),
        }
    }
}

impl Optimizer for AdamW {
    fn step_with(&mut self, lr: f64, scalars: DeviceScalars<'_>) -> Result<()> {
        let AdamWConfig {
            beta1,
            beta2,
            eps,
            weight_decay,
        } = self.config;
        let config = kernel::AdamW {
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
        };
        self.state.update(|batch| update(batch, &config, scalars))
    }

    delegate_state!(state);
}

fn update(batch: &Batch<3>, config: &kernel::AdamW, scalars: DeviceScalars<'_>) -> Result<()> {
    let scale = batch.fused_scale(scalars.grad_scale)?;
    let scalars = DeviceScalars {
        grad_scale: scale.as_ref(),
        ..scalars
    };
    let [exp_avgs, exp_avg_sqs, steps] = &batch.slots;
    let state = kernel::AdamWState {
        params: &batch.parameters,
        grads: &batch.gradients,
        exp_avgs,
        exp_avg_sqs,
        steps,
    };
    Ok(kernel::fused_adamw(&state, config, scalars)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Fixture, assert_close};

    const CONFIG: AdamWConfig = AdamWConfig {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
    };

    /// AdamW as in the paper, element by element.
    fn reference(o: &AdamWConfig) -> impl FnMut(&mut [f64], &[f64], f64) {
        let (mut m, mut v, mut t) = (vec![0.0; 64], vec![0.0; 64], 0);
        let o = *o;
        move |w, g, lr| {
            t += 1;
            for i in 0..w.len() {
                m[i] = o.beta1 * m[i] + (1.0 - o.beta1) * g[i];
                v[i] = o.beta2 * v[i] + (1.0 - o.beta2) * g[i] * g[i];
                let m_hat = m[i] / (1.0 - o.beta1.powi(t));
                let v_hat: f64 = v[i] / (1.0 - o.beta2.powi(t));
                w[i] -= lr * o.weight_decay * w[i];
                w[i] -= lr * m_hat / (v_hat.sqrt() + o.eps);
            }
        }
    }

    #[test]
    fn equals_the_formula() {
        Fixture::new().assert_follows(
            |parameters| AdamW::new(parameters, CONFIG),
            || reference(&CONFIG),
        );
    }

    /// Expected values are from `torch.optim.AdamW` of PyTorch 2.13 on the same inputs.
    #[test]
    fn equals_pytorch() {
        let gradients = [
            [0.1, -0.2, 0.3, -0.4, 0.5],
            [-0.05, 0.25, 0.0, 1.5, -2.0],
            [1.0, 1e-3, -1e-5, 0.75, 0.125],
        ];
        let expected = [
            0.47970198579287704,
            -1.2395438696409584,
            1.9668090315794076,
            -0.12867608617780876,
            2.9925665972872064,
        ];
        let fixture = Fixture::with(&[&[0.5, -1.25, 2.0, -0.125, 3.0]]);
        let mut adamw = AdamW::new(fixture.parameters(), CONFIG);
        for (gradient, lr) in gradients.iter().zip([0.01, 0.02, 0.005]) {
            fixture.set_gradient(0, gradient);
            adamw.step(lr).unwrap();
        }
        assert_close(&fixture.value(0), &expected);
        let state = adamw.state();
        let names: Vec<&str> = state.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["exp_avg.p0", "exp_avg_sq.p0", "step.p0"]);
        assert_eq!(state[2].1.double_value(&[]), 3.0);
        let exp_avg = [0.1036, 0.0064, 0.024299, 0.1776, -0.127];
        assert_close(&Vec::<f64>::try_from(&state[0].1).unwrap(), &exp_avg);
    }
}
