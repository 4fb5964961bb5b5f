//! Optimizers.
//!
//! ```no_run
//! # fn main() -> trainyard_optim::Result<()> {
//! # let parameters = Vec::new();
//! use trainyard_optim::{AdamW, AdamWConfig, Optimizer};
//!
//! let mut optimizer = AdamW::new(parameters, AdamWConfig::default());
//! optimizer.step(3e-4)?; // after every backward pass
//! # Ok(())
//! # }
//! ```
//!
//! Each optimizer is an update rule on lists of tensors; `state.rs` determines which parameters take part in a step and where
//! their state is. Parameters may be full or sharded. [`AdamW`], [`Sgd`] and [`Lion`] update every element by itself. [`Lamb`], [`Lars`]
//! and [`Muon`] need what other ranks have of a parameter, and get the world: the first two its norm, the last one the
//! matrix. All of it runs on meta tensors. All but [`AdamW`] and [`Sgd`] read a value back from the device, `found_inf`, because
//! no fused kernel does it for them.

mod adamw;
mod batch;
mod error;
#[cfg(test)]
mod fixture;
mod found_inf;
mod lamb;
mod lars;
mod lion;
mod muon;
mod newton_schulz;
mod sgd;
mod shard_groups;
mod state;
mod trust;

use tch::Tensor;
use trainyard_nn::Parameter;
pub use trainyard_torch::kernel::DeviceScalars;

pub use adamw::{AdamW, AdamWConfig};
pub use error::{OptimError, Result};
pub use lamb::Lamb;
pub use lars::{Lars, LarsConfig};
pub use lion::{Lion, LionConfig};
pub use muon::{LrAdjustment, Muon, MuonConfig};
pub use sgd::{Sgd, SgdConfig};

/// Updates parameters from their gradients, as `torch.optim.Optimizer`.
pub trait Optimizer {
    /// One step. Parameters without a gradient, and their state, do not change.
    fn step(&mut self, lr: f64) -> Result<()> {
        self.step_with(lr, DeviceScalars::default())
    }

    /// As [`Optimizer::step`], with gradients divided by `grad_scale`, in place. Nothing changes if `found_inf` is 1.
    fn step_with(&mut self, lr: f64, scalars: DeviceScalars<'_>) -> Result<()>;

    /// The names of the state tensors that parameters have, such as `exp_avg`.
    fn kinds(&self) -> Vec<&'static str>;

    /// The number of state tensors of a parameter that have its shape.
    fn num_moments(&self, parameter: &Parameter) -> u64;

    /// Bytes of the state tensors of these parameters, by formula, without scalars.
    fn moment_bytes(&self, parameters: &[Parameter]) -> u64 {
        let of = |parameter: &Parameter| {
            let element = parameter.kind().elt_size_in_bytes();
            let bytes = (parameter.tensor().numel() * element) as u64;
            self.num_moments(parameter) * bytes
        };
        // Buffers have no state.
        let trained = parameters.iter().filter(|p| p.is_trainable());
        trained.map(of).sum()
    }

    /// All state tensors, each named as `exp_avg.<parameter>`. The tensors are shared, not copied.
    fn state(&self) -> Vec<(String, Tensor)>;

    /// Loads saved state; parameters that it does not name keep theirs. Returns an error and changes nothing if names,
    /// shapes or dtypes do not match.
    fn load_state(&mut self, state: Vec<(String, Tensor)>) -> Result<()>;

    /// Forgets the state of all parameters.
    fn clear_state(&mut self);
}

#[cfg(test)]
mod tests {
    use tch::Kind;
    use trainyard_torch::{memory, meta};
    use trainyard_trace::MemoryKind;

    use super::fixture::{Fixture, assert_close, numbers, one_rank};
    use super::*;

    const ALL: [&str; 7] = ["AdamW", "SGD", "Nesterov", "LAMB", "LARS", "Lion", "Muon"];

    fn build(name: &str, parameters: Vec<Parameter>) -> Box<dyn Optimizer> {
        let sgd = |nesterov| SgdConfig {
            momentum: 0.9,
            weight_decay: 0.1,
            nesterov,
        };
        let lars = LarsConfig {
            momentum: 0.9,
            weight_decay: 0.1,
            trust_coefficient: 1e-3,
            eps: 1e-8,
        };
        let adamw = AdamWConfig::default();
        match name {
            "AdamW" => Box::new(AdamW::new(parameters, adamw)),
            "SGD" => Box::new(Sgd::new(parameters, sgd(false))),
            "Nesterov" => Box::new(Sgd::new(parameters, sgd(true))),
            "LAMB" => Box::new(Lamb::new(parameters, adamw, &one_rank()).unwrap()),
            "Lion" => Box::new(Lion::new(parameters, LionConfig::default())),
            "LARS" => Box::new(Lars::new(parameters, lars, &one_rank()).unwrap()),
            _ => Box::new(Muon::new(parameters, MuonConfig::default(), &one_rank()).unwrap()),
        }
    }

    type Saved = Vec<(String, Tensor)>;

    fn copied(state: Saved) -> Saved {
        let copies = state
            .into_iter()
            .map(|(name, tensor)| (name, tensor.copy()));
        copies.collect()
    }

    #[test]
    fn parameters_without_gradient_do_not_change() {
        for name in ALL {
            let fixture = Fixture::new();
            let mut optimizer = build(name, fixture.parameters());
            let before = fixture.value(1);
            fixture.set_gradient(0, &[1.0; 6]);
            optimizer.step(0.1).unwrap();
            assert_eq!(fixture.value(1), before, "{name}");
            assert!(
                optimizer
                    .state()
                    .iter()
                    .all(|(name, _)| name.ends_with(".p0"))
            );

            // Its first step equals that of a parameter in an optimizer of its own.
            let alone = Fixture::with(&[&before]);
            let mut fresh = build(name, alone.parameters());
            for (fixture, index, optimizer) in
                [(&fixture, 1, &mut optimizer), (&alone, 0, &mut fresh)]
            {
                fixture.set_gradient(index, &[1.0, -2.0, 3.0, -4.0, 5.0]);
                optimizer.step(0.1).unwrap();
            }
            assert_close(&fixture.value(1), &alone.value(0));
        }
    }

    #[test]
    fn grad_scale_equals_scaling_before_the_step() {
        let scale = Tensor::from(4.0f32);
        for name in ALL {
            for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
                let run = |inside: bool| {
                    let start = Tensor::from_slice(&[0.5f32, -1.0, 2.0, 0.25]).to_kind(kind);
                    let leaf = start.set_requires_grad(true);
                    let parameter = Parameter::from_tensor("w", leaf.shallow_clone()).unwrap();
                    let mut optimizer = build(name, vec![parameter]);
                    for step in 1..4 {
                        leaf.shallow_clone().zero_grad();
                        (&leaf * &leaf * step).sum(kind).backward();
                        if !inside {
                            let _ = leaf.grad().g_div_scalar_(4.0);
                        }
                        let scalars = DeviceScalars {
                            grad_scale: inside.then_some(&scale),
                            ..DeviceScalars::default()
                        };
                        optimizer.step_with(0.1, scalars).unwrap();
                    }
                    (numbers(&leaf), numbers(&leaf.grad()))
                };
                assert_eq!(run(true), run(false), "{name} {kind:?}");
            }
        }
    }

    #[test]
    fn found_inf_changes_nothing() {
        for name in ALL {
            let (fixture, undisturbed) = (Fixture::new(), Fixture::new());
            let mut optimizer = build(name, fixture.parameters());
            let mut other = build(name, undisturbed.parameters());
            for (step, found) in [(0, 0.0f32), (1, 1.0), (2, 0.0)] {
                fixture.set_gradients(step);
                let found_inf = Tensor::from(found);
                let scalars = DeviceScalars {
                    grad_scale: None,
                    found_inf: Some(&found_inf),
                };
                optimizer.step_with(0.1, scalars).unwrap();
                if found == 0.0 {
                    undisturbed.set_gradients(step);
                    other.step(0.1).unwrap();
                }
            }
            for index in 0..3 {
                assert_eq!(fixture.value(index), undisturbed.value(index), "{name}");
            }
            for ((name, found), (_, expected)) in optimizer.state().iter().zip(other.state()) {
                assert!(found.equal(&expected), "{name}");
            }
        }
    }

    #[test]
    fn loaded_state_continues_training_exactly() {
        for name in ALL {
            let (fixture, resumed) = (Fixture::new(), Fixture::new());
            let mut optimizer = build(name, fixture.parameters());
            for step in 0..3 {
                fixture.set_gradients(step);
                optimizer.step(0.1).unwrap();
            }
            for (source, target) in fixture.parameters().iter().zip(resumed.parameters()) {
                tch::no_grad(|| target.tensor().shallow_clone().copy_(source.tensor()));
            }
            let mut other = build(name, resumed.parameters());
            other.load_state(copied(optimizer.state())).unwrap();
            for (fixture, optimizer) in [(&fixture, &mut optimizer), (&resumed, &mut other)] {
                fixture.set_gradients(3);
                optimizer.step(0.1).unwrap();
            }
            for index in 0..3 {
                assert_eq!(fixture.value(index), resumed.value(index), "{name}");
            }
        }
    }

    #[test]
    fn mismatched_state_is_rejected_by_name_and_changes_nothing() {
        let fixture = Fixture::new();
        let mut optimizer = build("AdamW", fixture.parameters());
        fixture.set_gradients(0);
        optimizer.step(0.1).unwrap();
        let saved = copied(optimizer.state());
        let with = |change: &dyn Fn(&mut Saved)| {
            let mut state = copied(optimizer.state());
            change(&mut state);
            state
        };
        let unknown = with(&|s| s.push(("exp_avg.q".into(), Tensor::from(1.0))));
        let missing = with(&|s| drop(s.remove(1)));
        let shape = with(&|s| s[0].1 = Tensor::from_slice(&[1.0f64]));
        let kind = with(&|s| s[0].1 = s[0].1.to_kind(Kind::Float));
        let mut reject = |state| optimizer.load_state(state).unwrap_err();
        assert!(
            matches!(reject(unknown), OptimError::UnknownState { name } if name == "exp_avg.q")
        );
        assert!(
            matches!(reject(missing), OptimError::MissingState { name } if name == "exp_avg_sq.p0")
        );
        assert!(
            matches!(reject(shape), OptimError::StateMismatch { name, .. } if name == "exp_avg.p0")
        );
        assert!(
            matches!(reject(kind), OptimError::StateMismatch { name, .. } if name == "exp_avg.p0")
        );
        for ((_, before), (_, after)) in saved.iter().zip(optimizer.state()) {
            assert!(before.equal(&after));
        }
    }

    #[test]
    fn steps_run_on_the_meta_device_and_their_state_is_counted() {
        memory::observe();
        for name in ALL {
            let leaf = meta::empty(&[1 << 20, 1 << 10], Kind::Float).unwrap();
            let leaf = leaf.set_requires_grad(true);
            let parameter = Parameter::from_tensor("w", leaf.shallow_clone()).unwrap();
            (&leaf * 2.0).sum(Kind::Float).backward();
            let allocated = || memory::report().unwrap().allocated[2];
            let before = allocated();
            let mut optimizer = build(name, vec![parameter]);
            let scale = leaf.grad().norm();
            let scalars = DeviceScalars {
                grad_scale: Some(&scale),
                found_inf: None,
            };
            optimizer.step_with(0.1, scalars).unwrap();
            optimizer.step(0.1).unwrap();
            assert_eq!(memory::KINDS[2], MemoryKind::Optimizer);
            let copies = match name {
                "AdamW" | "LAMB" => 2,
                _ => 1,
            };
            let (grown, expected) = (allocated() - before, copies << 32);
            assert!(grown.abs_diff(expected) <= 1024, "{name}: {grown}");
        }
    }
}
