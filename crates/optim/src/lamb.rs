//! LAMB: Adam with layer-wise trust ratios, for large batches (You et al., 2020).

use tch::{Kind, Tensor};
use trainyard_nn::Parameter;
use trainyard_torch::{World, kernel};

use crate::adamw::{AdamWConfig, MOMENTS};
use crate::batch::Batch;
use crate::found_inf::is_set;
use crate::shard_groups::ShardGroups;
use crate::state::{State, delegate_state};
use crate::trust::{elements, full_norms, ratio_or_one, zero_norms};
use crate::{DeviceScalars, Optimizer, Result};

/// LAMB, as `foreach` operations on all parameters of a dtype. Norms are those of full parameters, over the ranks that
/// hold their shards.
pub struct Lamb {
    config: AdamWConfig,
    state: State<3>,
    shards: ShardGroups,
}

impl Lamb {
    /// A LAMB optimizer for these parameters, which may be sharded over ranks of `world`.
    pub fn new(parameters: Vec<Parameter>, config: AdamWConfig, world: &World) -> Result<Lamb> {
        Ok(Lamb {
            config,
            shards: ShardGroups::new(&parameters, world)?,
            state: State::new(MOMENTS, parameters),
        })
    }
}

impl Optimizer for Lamb {
    fn step_with(&mut self, lr: f64, scalars: DeviceScalars<'_>) -> Result<()> {
        if is_set(scalars.found_inf)? {
            return Ok(());
        }
        let (config, shards) = (self.config, &self.shards);
        let zeros = zero_norms(self.state.parameters())?;
        self.state.update_together(|batches| {
            let mut directions = Vec::with_capacity(batches.len());
            for batch in batches {
                batch.divide_gradients(scalars.grad_scale)?;
                advance_moments(batch, &config)?;
                directions.push(direction(batch, &config)?);
            }
            let norms = full_norms(batches, &directions, shards, zeros)?;
            for ((batch, direction), [weights, updates]) in
                batches.iter().zip(&directions).zip(norms)
            {
                let trust = ratio_or_one(&weights, &updates)?;
                kernel::foreach_mul_list_(direction, &elements(&trust, batch.kind)?)?;
                kernel::foreach_add_(&batch.parameters, direction, -lr)?;
            }
            Ok(())
        })
    }

    delegate_state!(state);
}

/// Increments the step counts and updates both moments.
fn advance_moments(batch: &Batch<3>, config: &AdamWConfig) -> Result<()> {
    let [exp_avgs, exp_avg_sqs, steps] = &batch.slots;
    let gradients = &batch.gradients;
    for step in steps {
        let _ = step.shallow_clone().f_add_scalar_(1)?;
    }
    kernel::foreach_lerp_(exp_avgs, gradients, 1.0 - config.beta1)?;
    kernel::foreach_mul_(exp_avg_sqs, config.beta2)?;
    kernel::foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1.0 - config.beta2)?;
    Ok(())
}

/// The bias-corrected update direction of Adam plus weight decay, as new tensors.
fn direction(batch: &Batch<3>, config: &AdamWConfig) -> Result<Vec<Tensor>> {
    let [exp_avgs, exp_avg_sqs, steps] = &batch.slots;
    let steps = Tensor::f_stack(steps, 0)?.f_to_kind(Kind::Double)?;
    let first = bias_correction(config.beta1, &steps)?.f_reciprocal()?;
    let second = bias_correction(config.beta2, &steps)?.f_rsqrt()?;

    let denominators = kernel::foreach_sqrt(exp_avg_sqs)?;
    kernel::foreach_mul_list_(&denominators, &elements(&second, batch.kind)?)?;
    let ones = elements(&steps.f_ones_like()?, batch.kind)?;
    kernel::foreach_add_(&denominators, &ones, config.eps)?;

    let directions = zeros_like(exp_avgs)?;
    kernel::foreach_addcdiv_(&directions, exp_avgs, &denominators, 1.0)?;
    kernel::foreach_mul_list_(&directions, &elements(&first, batch.kind)?)?;
    kernel::foreach_add_(&directions, &batch.parameters, config.weight_decay)?;
    Ok(directions)
}

/// `1 - beta ^ step` for each parameter.
fn bias_correction(beta: f64, steps: &Tensor) -> Result<Tensor> {
    let power = Tensor::f_pow_scalar(beta, steps)?;
    Ok(power.f_neg()?.f_add_scalar(1)?)
}

fn zeros_like(tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    let zeros = tensors.iter().map(|tensor| Ok(tensor.f_zeros_like()?));
    zeros.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Fixture, norm, one_rank};

    const CONFIG: AdamWConfig = AdamWConfig {
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-6,
        weight_decay: 0.01,
    };

    /// LAMB as in the paper, element by element.
    fn reference() -> impl FnMut(&mut [f64], &[f64], f64) {
        let (mut m, mut v, mut t) = (vec![0.0; 64], vec![0.0f64; 64], 0);
        let o = CONFIG;
        move |w, g, lr| {
            t += 1;
            let mut u = vec![0.0; w.len()];
            for i in 0..w.len() {
                m[i] = o.beta1 * m[i] + (1.0 - o.beta1) * g[i];
                v[i] = o.beta2 * v[i] + (1.0 - o.beta2) * g[i] * g[i];
                let m_hat = m[i] / (1.0 - o.beta1.powi(t));
                let v_hat = v[i] / (1.0 - o.beta2.powi(t));
                u[i] = m_hat / (v_hat.sqrt() + o.eps) + o.weight_decay * w[i];
            }
            let (w_norm, u_norm) = (norm(w), norm(&u));
            let trust = if w_norm > 0.0 && u_norm > 0.0 {
                w_norm / u_norm
            } else {
                1.0
            };
            for i in 0..w.len() {
                w[i] -= lr * trust * u[i];
            }
        }
    }

    #[test]
    fn equals_the_formula() {
        Fixture::new().assert_follows(
            |parameters| Lamb::new(parameters, CONFIG, &one_rank()).unwrap(),
            reference,
        );
    }
}
