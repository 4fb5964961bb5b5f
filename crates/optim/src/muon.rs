//! Muon: momentum whose matrices are made orthogonal (Jordan et al., 2024), and AdamW for everything else.
//!
//! An update needs the full matrix: where it is sharded, its momentum is gathered from the ranks that hold its shards, each
//! of them computes the same update, and applies its own shard of it. The state stays sharded.

use tch::Tensor;
use trainyard_nn::{Parameter, Shards};
use trainyard_torch::{World, kernel};

use crate::adamw::{AdamW, AdamWConfig};
use crate::found_inf::is_set;
use crate::newton_schulz::orthogonalize;
use crate::sgd::MOMENTUM;
use crate::state::State;
use crate::{DeviceScalars, Optimizer, Result};

/// Parts of names of two-dimensional parameters that are no hidden matrices: embeddings and heads.
const NOT_HIDDEN: [&str; 4] = ["embed", "lm_head", "wte", "wpe"];

/// How the learning rate of a matrix follows from its shape.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum LrAdjustment {
    /// By the root of rows per column, if that is more than 1 (Jordan et al.).
    Original,
    /// So that updates are as large as those of AdamW, whose learning rate then serves for both (Liu et al., 2025).
    MatchRmsAdamW,
}

/// Hyperparameters of Muon.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct MuonConfig {
    /// Momentum coefficient.
    pub momentum: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Decoupled weight decay coefficient.
    pub weight_decay: f64,
    /// The smallest norm that a matrix is divided by.
    pub eps: f64,
    /// Steps of the Newton-Schulz iteration.
    pub num_steps: usize,
    /// How the learning rate of a matrix follows from its shape.
    pub lr_adjustment: LrAdjustment,
    /// The hyperparameters of all other parameters.
    pub adamw: AdamWConfig,
}

/// The values of `torch.optim.Muon`.
impl Default for MuonConfig {
    fn default() -> MuonConfig {
        MuonConfig {
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            eps: 1e-7,
            num_steps: 5,
            lr_adjustment: LrAdjustment::Original,
            adamw: AdamWConfig::default(),
        }
    }
}

/// Muon for matrices, AdamW for the rest.
pub struct Muon {
    config: MuonConfig,
    matrices: State<1>,
    /// Where the shard of each matrix lies.
    shards: Vec<Shards>,
    rest: AdamW,
}

impl Muon {
    /// A Muon optimizer for the [hidden matrices](Muon::is_hidden_matrix) among these parameters, which may be sharded over
    /// ranks of `world`, and AdamW for the others.
    pub fn new(parameters: Vec<Parameter>, config: MuonConfig, world: &World) -> Result<Muon> {
        let (matrices, rest): (Vec<_>, Vec<_>) =
            parameters.into_iter().partition(Muon::is_hidden_matrix);
        let shards = matrices
            .iter()
            .map(|matrix| Shards::of_matrices(matrix, world));
        Ok(Muon {
            config,
            shards: shards.collect::<Result<_, _>>()?,
            matrices: State::new([MOMENTUM], matrices),
            rest: AdamW::new(rest, config.adamw),
        })
    }

    /// Whether a parameter is a matrix between hidden layers, or such matrices of several experts: no embedding, no head, no
    /// norm, no bias.
    pub fn is_hidden_matrix(parameter: &Parameter) -> bool {
        let name = parameter.name();
        match parameter.shape().len() {
            // Of experts, it is a vector for each.
            2 if parameter.layout().is_expert() => false,
            2 => !NOT_HIDDEN.iter().any(|part| name.contains(part)),
            3 => name.contains(".experts."),
            _ => false,
        }
    }
}

impl Optimizer for Muon {
    fn step_with(&mut self, lr: f64, scalars: DeviceScalars<'_>) -> Result<()> {
        if is_set(scalars.found_inf)? {
            return Ok(());
        }
        let (config, shards) = (self.config, &self.shards);
        self.matrices.update_together(|batches| {
            for batch in batches {
                batch.divide_gradients(scalars.grad_scale)?;
                let (gradients, [momenta]) = (&batch.gradients, &batch.slots);
                kernel::foreach_lerp_(momenta, gradients, 1.0 - config.momentum)?;
                kernel::foreach_mul_(&batch.parameters, 1.0 - lr * config.weight_decay)?;
                for (member, &index) in batch.indices.iter().enumerate() {
                    let (gradient, momentum) = (&gradients[member], &momenta[member]);
                    let update = config.update(gradient, momentum, &shards[index])?;
                    let rate = lr * config.lr_adjustment.factor(shards[index].shape());
                    let mut parameter = batch.parameters[member].shallow_clone();
                    let _ = parameter.f_add_(&update.f_mul_scalar(-rate)?)?;
                }
            }
            Ok(())
        })?;
        self.rest.step_with(lr, scalars)
    }

    fn kinds(&self) -> Vec<&'static str> {
        [self.matrices.kinds(), self.rest.kinds()].concat()
    }

    fn num_moments(&self, parameter: &Parameter) -> u64 {
        if Muon::is_hidden_matrix(parameter) {
            1
        } else {
            self.rest.num_moments(parameter)
        }
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        let mut state = self.matrices.named();
        state.extend(self.rest.state());
        state
    }

    fn load_state(&mut self, state: Vec<(String, Tensor)>) -> Result<()> {
        let (momenta, moments): (Vec<_>, Vec<_>) = state
            .into_iter()
            .partition(|(name, _)| name.starts_with(MOMENTUM.name));
        let momenta = self.matrices.restored(momenta)?;
        self.rest.load_state(moments)?;
        self.matrices.replace(momenta);
        Ok(())
    }

    fn clear_state(&mut self) {
        self.matrices.clear();
        self.rest.clear_state();
    }
}

impl MuonConfig {
    /// This rank's shard of a matrix's update, from its shards of gradient and momentum.
    fn update(&self, gradient: &Tensor, momentum: &Tensor, shards: &Shards) -> Result<Tensor> {
        let ahead = if self.nesterov {
            gradient.f_lerp(momentum, self.momentum)?
        } else {
            momentum.shallow_clone()
        };
        let full = shards.gather(&ahead)?;
        let full = orthogonalize(&full, self.num_steps, self.eps)?;
        Ok(shards.own(&full)?)
    }
}

impl LrAdjustment {
    /// The factor for a matrix of this shape.
    fn factor(self, shape: &[usize]) -> f64 {
        let [.., rows, columns] = *shape else {
            return 1.0;
        };
        let (rows, columns) = (rows as f64, columns as f64);
        match self {
            LrAdjustment::Original => (rows / columns).max(1.0).sqrt(),
            LrAdjustment::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::fixture::{assert_close, numbers, one_rank, wave};

    /// Three steps of a matrix, as `torch.optim.Muon` of PyTorch 2.13 computes them with its default values.
    const FROM_PYTORCH: [(&[i64], &[f64]); 2] = [
        (
            &[4, 3],
            &[
                0.683033, -0.78585, -0.477274, 0.890694, 0.25857, -0.982365, 0.010257, 0.986574,
                -0.246435, -0.912687, 0.478935, 0.766706,
            ],
        ),
        (
            &[3, 5],
            &[
                0.680393, -0.771584, -0.493193, 0.919532, 0.260862, -0.98353, 0.005731, 0.968829,
                -0.229954, -0.903562, 0.467608, 0.79549, -0.683498, -0.599034, 0.842508,
            ],
        ),
    ];

    fn trained(shape: &[i64], kind: Kind) -> Vec<f64> {
        let length = shape.iter().product::<i64>() as usize;
        let matrix = |salt| {
            let values: Vec<f64> = (0..length).map(|i| wave(i, salt)).collect();
            Tensor::from_slice(&values).to_kind(kind).view(shape)
        };
        let leaf = matrix(1).set_requires_grad(true);
        let parameter = Parameter::from_tensor("w", leaf.shallow_clone()).unwrap();
        let mut muon =
            Muon::new(vec![parameter.clone()], MuonConfig::default(), &one_rank()).unwrap();
        for step in 0..3 {
            parameter.set_gradient(Some(matrix(3 + 7 * step)));
            muon.step(0.1).unwrap();
        }
        numbers(&leaf)
    }

    /// In float32, where the iteration itself has eight bits of precision in both.
    #[test]
    fn equals_pytorch() {
        for (shape, expected) in FROM_PYTORCH {
            for (found, expected) in trained(shape, Kind::Float).iter().zip(expected) {
                assert!((found - expected).abs() < 1e-3, "{found} != {expected}");
            }
        }
    }

    type Matrix = Vec<Vec<f64>>;

    fn transposed(a: &Matrix) -> Matrix {
        let columns = 0..a[0].len();
        columns
            .map(|j| a.iter().map(|row| row[j]).collect())
            .collect()
    }

    fn product(a: &Matrix, b: &Matrix) -> Matrix {
        let b = transposed(b);
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum();
        let row = |x: &Vec<f64>| b.iter().map(|y| dot(x, y)).collect();
        a.iter().map(row).collect()
    }

    fn sum(x: f64, a: &Matrix, y: f64, b: &Matrix) -> Matrix {
        let add = |(a, b): (&Vec<f64>, &Vec<f64>)| {
            let pairs = a.iter().zip(b);
            pairs.map(|(a, b)| x * a + y * b).collect()
        };
        a.iter().zip(b).map(add).collect()
    }

    /// One step of the paper's iteration after the other, on plain numbers: X <- aX + (bA + cA^2) X with A = X X^T.
    fn iterated(matrix: &Matrix) -> Matrix {
        if matrix.len() > matrix[0].len() {
            return transposed(&iterated(&transposed(matrix)));
        }
        let norm = matrix.iter().flatten().map(|x| x * x).sum::<f64>().sqrt();
        let mut x = sum(1.0 / norm, matrix, 0.0, matrix);
        for _ in 0..5 {
            let gram = product(&x, &transposed(&x));
            let update = sum(-4.7750, &gram, 2.0315, &product(&gram, &gram));
            x = sum(3.4445, &x, 1.0, &product(&update, &x));
        }
        x
    }

    /// In float64, where the iteration is exact.
    #[test]
    fn equals_the_formula() {
        for (rows, columns) in [(4, 3), (3, 5)] {
            let matrix = |salt: usize| -> Matrix {
                let row = |i: usize| (0..columns).map(|j| wave(i * columns + j, salt)).collect();
                (0..rows).map(row).collect()
            };
            let mut weights = matrix(1);
            let mut momentum = sum(0.0, &weights, 0.0, &weights);
            for step in 0..3 {
                let gradient = matrix(3 + 7 * step);
                momentum = sum(0.95, &momentum, 0.05, &gradient);
                let update = iterated(&sum(0.05, &gradient, 0.95, &momentum));
                let rate = 0.1 * (rows as f64 / columns as f64).max(1.0).sqrt();
                weights = sum(1.0 - 0.1 * 0.1, &weights, -rate, &update);
            }
            let found = trained(&[rows as i64, columns as i64], Kind::Double);
            assert_close(&found, &weights.concat());
        }
    }

    #[test]
    fn only_hidden_matrices_are_orthogonalized() {
        let of = |name: &str, shape: &[i64]| {
            let tensor = Tensor::zeros(shape, (Kind::Float, tch::Device::Cpu));
            let tensor = tensor.set_requires_grad(true);
            Muon::is_hidden_matrix(&Parameter::from_tensor(name, tensor).unwrap())
        };
        assert!(of("model.layers.0.mlp.up_proj.weight", &[4, 2]));
        assert!(of("model.layers.0.mlp.experts.down_proj", &[3, 4, 2]));
        assert!(!of("model.embed_tokens.weight", &[4, 2]));
        assert!(!of("lm_head.weight", &[4, 2]));
        assert!(!of("model.norm.weight", &[4]));
        assert!(!of("transformer.h.0.attn.c_attn.weight", &[4, 3, 4]));
    }
}
