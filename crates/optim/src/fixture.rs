//! Test fixture for optimizers: float64 parameters, known gradients, and a comparison with a reference
//! implementation on plain numbers.

use tch::{Kind, Tensor};
use trainyard_nn::Parameter;
use trainyard_torch::World;
use trainyard_trace::Ledger;

use crate::{DeviceScalars, Optimizer};

/// Test parameters, named `p0`, `p1`, ...
pub(crate) struct Fixture(Vec<Parameter>);

impl Fixture {
    /// Three parameters, the last of them all zeros.
    pub(crate) fn new() -> Fixture {
        let first: Vec<f64> = (0..6).map(|i| wave(i, 1)).collect();
        let second: Vec<f64> = (0..5).map(|i| 10.0 * wave(i, 2)).collect();
        Fixture::with(&[&first, &second, &[0.0; 4]])
    }

    /// One parameter for each list of values.
    pub(crate) fn with(values: &[&[f64]]) -> Fixture {
        let leaf = |values: &[f64]| Tensor::from_slice(values).set_requires_grad(true);
        let parameters = values.iter().enumerate();
        let named = parameters.map(|(i, v)| Parameter::from_tensor(format!("p{i}"), leaf(v)));
        Fixture(named.collect::<Result<_, _>>().unwrap())
    }

    pub(crate) fn parameters(&self) -> Vec<Parameter> {
        self.0.clone()
    }

    pub(crate) fn value(&self, index: usize) -> Vec<f64> {
        numbers(self.0[index].tensor())
    }

    pub(crate) fn gradient(&self, index: usize) -> Vec<f64> {
        numbers(&self.0[index].tensor().grad())
    }

    pub(crate) fn set_gradient(&self, index: usize, gradient: &[f64]) {
        let mut leaf = self.0[index].tensor().shallow_clone();
        leaf.zero_grad();
        (&leaf * Tensor::from_slice(gradient))
            .sum(Kind::Double)
            .backward();
    }

    /// Sets the gradients of all parameters for a step.
    pub(crate) fn set_gradients(&self, step: usize) {
        for index in 0..self.0.len() {
            let length = self.value(index).len();
            let gradient: Vec<f64> = (0..length).map(|i| wave(i, 3 + index + 7 * step)).collect();
            self.set_gradient(index, &gradient);
        }
    }

    /// Asserts that an optimizer computes the same as a reference rule on plain numbers (parameter, gradient,
    /// learning rate), with scaled gradients in every second step.
    pub(crate) fn assert_follows<O: Optimizer, R: FnMut(&mut [f64], &[f64], f64)>(
        &self,
        optimizer: impl FnOnce(Vec<Parameter>) -> O,
        rule: impl Fn() -> R,
    ) {
        let mut optimizer = optimizer(self.parameters());
        let mut rules: Vec<R> = self.0.iter().map(|_| rule()).collect();
        let mut expected: Vec<Vec<f64>> = (0..self.0.len()).map(|i| self.value(i)).collect();
        for step in 0..7 {
            let lr = 0.1 / (1.0 + step as f64);
            let scale = if step % 2 == 1 { 2.5 } else { 1.0 };
            self.set_gradients(step);
            for (index, rule) in rules.iter_mut().enumerate() {
                let scaled: Vec<f64> = self.gradient(index).iter().map(|g| g / scale).collect();
                rule(&mut expected[index], &scaled, lr);
            }
            let divisor = Tensor::from(scale);
            let scalars = DeviceScalars {
                grad_scale: (scale != 1.0).then_some(&divisor),
                found_inf: None,
            };
            optimizer.step_with(lr, scalars).unwrap();
            for (index, expected) in expected.iter().enumerate() {
                assert_close(&self.value(index), expected);
            }
        }
    }
}

/// A world of one rank.
pub(crate) fn one_rank() -> World {
    World::single_rank(Ledger::new(0)).unwrap()
}

pub(crate) fn assert_close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let tolerance = 1e-12 * expected.abs().max(1.0);
        assert!(
            (found - expected).abs() <= tolerance,
            "{found} != {expected}"
        );
    }
}

pub(crate) fn norm(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

pub(crate) fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape(-1i64)).unwrap()
}

/// Pseudo-random numbers between -1 and 1.
pub(crate) fn wave(index: usize, salt: usize) -> f64 {
    (1.7 * index as f64 + 2.3 * salt as f64).sin()
}
