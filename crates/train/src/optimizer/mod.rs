//! Optimizers.
//!
//! Each optimizer ([`AdamW`], [`Sgd`], [`Lamb`], [`Lars`]) is an update rule on lists of tensors; `state.rs`
//! determines which parameters take part in a step and where their state is. All of it runs on meta tensors,
//! and only LAMB and LARS read a value back from the device, `found_inf`, because no fused kernel does it for them.

mod adamw;
mod batch;
#[cfg(test)]
mod fixture;
mod lamb;
mod lars;
mod sgd;
mod state;
mod trust;

use tch::Tensor;
pub use trainyard_torch::kernel::DeviceScalars;

use trainyard_config::{OptimizerImplementation, OptimizerName, OptimizerSection};
use trainyard_nn::Parameter;

use crate::Result;

pub use adamw::{AdamW, AdamWOptions};
pub use lamb::Lamb;
pub use lars::{Lars, LarsOptions};
pub use sgd::{Sgd, SgdOptions};

/// Updates parameters from their gradients, as `torch.optim.Optimizer`.
pub trait Optimizer {
    /// One step. Parameters without a gradient, and their state, do not change.
    fn step(&mut self, lr: f64) -> Result<()> {
        self.step_with(lr, DeviceScalars::default())
    }

    /// As [`Optimizer::step`], with gradients divided by `grad_scale`, in place. Nothing changes if `found_inf` is 1.
    fn step_with(&mut self, lr: f64, scalars: DeviceScalars<'_>) -> Result<()>;

    /// The names of the state tensors per parameter, such as `exp_avg`.
    fn kinds(&self) -> Vec<&'static str>;

    /// All state tensors, each named as `exp_avg.<parameter>`. The tensors are shared, not copied.
    fn state(&self) -> Vec<(String, Tensor)>;

    /// Loads saved state. Returns an error and changes nothing if names, shapes or dtypes do not match.
    fn load_state(&mut self, state: Vec<(String, Tensor)>) -> Result<()>;
}

/// Builds the optimizer of a config.
pub fn build(config: &OptimizerSection, parameters: Vec<Parameter>) -> Box<dyn Optimizer> {
    warn_if_ignored(config);
    match config.name {
        OptimizerName::AdamW => Box::new(AdamW::new(config.into(), parameters)),
        OptimizerName::Sgd => Box::new(Sgd::new(config.into(), parameters)),
        OptimizerName::Lamb => Box::new(Lamb::new(config.into(), parameters)),
        OptimizerName::Lars => Box::new(Lars::new(config.into(), parameters)),
    }
}

/// torchtitan's `for-loop` and `foreach` implementations do not exist here: all compute the same as `fused`.
fn warn_if_ignored(config: &OptimizerSection) {
    if config.implementation != OptimizerImplementation::Fused {
        tracing::warn!(
            "optimizer.implementation = {:?} has no effect: fused kernels are always used",
            config.implementation
        );
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;
    use trainyard_torch::{memory, meta};
    use trainyard_trace::MemoryKind;

    use super::fixture::{Fixture, assert_close, numbers};
    use super::*;
    use crate::TrainError;

    const ALL: [OptimizerName; 4] = [
        OptimizerName::AdamW,
        OptimizerName::Sgd,
        OptimizerName::Lamb,
        OptimizerName::Lars,
    ];

    fn config(name: OptimizerName) -> OptimizerSection {
        OptimizerSection {
            name,
            ..OptimizerSection::default()
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
            let mut optimizer = build(&config(name), fixture.parameters());
            let before = fixture.value(1);
            fixture.set_gradient(0, &[1.0; 6]);
            optimizer.step(0.1).unwrap();
            assert_eq!(fixture.value(1), before, "{name:?}");
            assert!(
                optimizer
                    .state()
                    .iter()
                    .all(|(name, _)| name.ends_with(".p0"))
            );

            // Its first step equals that of a parameter in an optimizer of its own.
            let alone = Fixture::with(&[&before]);
            let mut fresh = build(&config(name), alone.parameters());
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
                    let mut optimizer = build(&config(name), vec![parameter]);
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
                assert_eq!(run(true), run(false), "{name:?} {kind:?}");
            }
        }
    }

    #[test]
    fn found_inf_changes_nothing() {
        for name in ALL {
            let (fixture, undisturbed) = (Fixture::new(), Fixture::new());
            let mut optimizer = build(&config(name), fixture.parameters());
            let mut other = build(&config(name), undisturbed.parameters());
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
                assert_eq!(fixture.value(index), undisturbed.value(index), "{name:?}");
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
            let mut optimizer = build(&config(name), fixture.parameters());
            for step in 0..3 {
                fixture.set_gradients(step);
                optimizer.step(0.1).unwrap();
            }
            for (source, target) in fixture.parameters().iter().zip(resumed.parameters()) {
                tch::no_grad(|| target.tensor().shallow_clone().copy_(source.tensor()));
            }
            let mut other = build(&config(name), resumed.parameters());
            other.load_state(copied(optimizer.state())).unwrap();
            for (fixture, optimizer) in [(&fixture, &mut optimizer), (&resumed, &mut other)] {
                fixture.set_gradients(3);
                optimizer.step(0.1).unwrap();
            }
            for index in 0..3 {
                assert_eq!(fixture.value(index), resumed.value(index), "{name:?}");
            }
        }
    }

    #[test]
    fn mismatched_state_is_rejected_by_name_and_changes_nothing() {
        let fixture = Fixture::new();
        let mut optimizer = build(&config(OptimizerName::AdamW), fixture.parameters());
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
            matches!(reject(unknown), TrainError::UnknownState { name } if name == "exp_avg.q")
        );
        assert!(
            matches!(reject(missing), TrainError::MissingState { name } if name == "exp_avg_sq.p0")
        );
        assert!(
            matches!(reject(shape), TrainError::StateMismatch { name, .. } if name == "exp_avg.p0")
        );
        assert!(
            matches!(reject(kind), TrainError::StateMismatch { name, .. } if name == "exp_avg.p0")
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
            let mut optimizer = build(&config(name), vec![parameter]);
            let scale = leaf.grad().norm();
            let scalars = DeviceScalars {
                grad_scale: Some(&scale),
                found_inf: None,
            };
            optimizer.step_with(0.1, scalars).unwrap();
            optimizer.step(0.1).unwrap();
            assert_eq!(memory::KINDS[2], MemoryKind::Optimizer);
            let copies = match name {
                OptimizerName::AdamW | OptimizerName::Lamb => 2,
                OptimizerName::Sgd | OptimizerName::Lars => 1,
            };
            let (grown, expected) = (allocated() - before, copies << 32);
            assert!(grown.abs_diff(expected) <= 1024, "{name:?}: {grown}");
        }
    }
}
