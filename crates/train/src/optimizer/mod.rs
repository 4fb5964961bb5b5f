//! Optimisers: how gradients change parameters.
//!
//! A rule ([`AdamW`], [`Sgd`], [`Lamb`], [`Lars`]) is arithmetic on lists of tensors; which
//! parameters take part in a step, and where their state lives, is told once, in `state.rs`.
//! Nothing here reads a number back from a device, and everything runs on meta tensors.

mod adamw;
mod batch;
mod lamb;
mod lars;
#[cfg(test)]
mod oracle;
mod sgd;
mod state;
mod trust;

use tch::Tensor;
use trainyard_config::{OptimizerImplementation, OptimizerName, OptimizerSection};
use trainyard_nn::Parameter;

use crate::Result;

pub use adamw::{AdamW, AdamWOptions};
pub use lamb::Lamb;
pub use lars::{Lars, LarsOptions};
pub use sgd::{Sgd, SgdOptions};

/// Changes parameters by their gradients.
pub trait Optimizer {
    /// One step. Gradients are divided by `grad_scale`, and stay so; a parameter without a gradient
    /// is passed over, and so is its state.
    fn step(&mut self, lr: f64, grad_scale: Option<&Tensor>) -> Result<()>;

    /// The names of what is kept beside each parameter, as they stand before the parameter's name.
    fn kinds(&self) -> Vec<&'static str>;

    /// The state so far, each tensor as `exp_avg.<parameter>`; the tensors are shared, not copied.
    fn state(&self) -> Vec<(String, Tensor)>;

    /// Goes on from the state of another run. Names, shapes and kinds must be this optimiser's, or
    /// nothing is changed.
    fn load_state(&mut self, state: Vec<(String, Tensor)>) -> Result<()>;
}

/// The optimiser a config asks for.
pub fn build(config: &OptimizerSection, parameters: Vec<Parameter>) -> Box<dyn Optimizer> {
    warn_if_ignored(config);
    match config.name {
        OptimizerName::AdamW => Box::new(AdamW::new(config.into(), parameters)),
        OptimizerName::Sgd => Box::new(Sgd::new(config.into(), parameters)),
        OptimizerName::Lamb => Box::new(Lamb::new(config.into(), parameters)),
        OptimizerName::Lars => Box::new(Lars::new(config.into(), parameters)),
    }
}

/// Every rule has one implementation, the fastest; all compute the same.
fn warn_if_ignored(config: &OptimizerSection) {
    if config.implementation != OptimizerImplementation::Fused {
        tracing::warn!(
            "optimizer.implementation = {:?} has no effect: the fastest kernels are always used",
            config.implementation
        );
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;
    use trainyard_torch::{memory, meta};
    use trainyard_trace::MemoryKind;

    use super::oracle::{Lab, assert_close, numbers};
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
    fn parameters_without_gradient_are_passed_over() {
        for name in ALL {
            let lab = Lab::new();
            let mut optimizer = build(&config(name), lab.parameters());
            let before = lab.value(1);
            lab.set_gradient(0, &[1.0; 6]);
            optimizer.step(0.1, None).unwrap();
            assert_eq!(lab.value(1), before, "{name:?}");
            assert!(
                optimizer
                    .state()
                    .iter()
                    .all(|(name, _)| name.ends_with(".p0"))
            );

            // Its own first step equals that of a parameter that was alone all the time.
            let alone = Lab::with(&[&before]);
            let mut fresh = build(&config(name), alone.parameters());
            for (lab, index, optimizer) in [(&lab, 1, &mut optimizer), (&alone, 0, &mut fresh)] {
                lab.set_gradient(index, &[1.0, -2.0, 3.0, -4.0, 5.0]);
                optimizer.step(0.1, None).unwrap();
            }
            assert_close(&lab.value(1), &alone.value(0));
        }
    }

    #[test]
    fn scaling_inside_equals_scaling_before() {
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
                        optimizer.step(0.1, inside.then_some(&scale)).unwrap();
                    }
                    (numbers(&leaf), numbers(&leaf.grad()))
                };
                assert_eq!(run(true), run(false), "{name:?} {kind:?}");
            }
        }
    }

    #[test]
    fn state_goes_on_where_it_stopped() {
        for name in ALL {
            let (lab, resumed) = (Lab::new(), Lab::new());
            let mut optimizer = build(&config(name), lab.parameters());
            for step in 0..3 {
                lab.set_gradients(step);
                optimizer.step(0.1, None).unwrap();
            }
            for (source, target) in lab.parameters().iter().zip(resumed.parameters()) {
                tch::no_grad(|| target.tensor().shallow_clone().copy_(source.tensor()));
            }
            let mut other = build(&config(name), resumed.parameters());
            other.load_state(copied(optimizer.state())).unwrap();
            for (lab, optimizer) in [(&lab, &mut optimizer), (&resumed, &mut other)] {
                lab.set_gradients(3);
                optimizer.step(0.1, None).unwrap();
            }
            for index in 0..3 {
                assert_eq!(lab.value(index), resumed.value(index), "{name:?}");
            }
        }
    }

    #[test]
    fn foreign_state_is_refused_by_name_and_changes_nothing() {
        let lab = Lab::new();
        let mut optimizer = build(&config(OptimizerName::AdamW), lab.parameters());
        lab.set_gradients(0);
        optimizer.step(0.1, None).unwrap();
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
        let mut refuse = |state| optimizer.load_state(state).unwrap_err();
        assert!(
            matches!(refuse(unknown), TrainError::UnknownState { name } if name == "exp_avg.q")
        );
        assert!(
            matches!(refuse(missing), TrainError::MissingState { name } if name == "exp_avg_sq.p0")
        );
        assert!(
            matches!(refuse(shape), TrainError::StateMismatch { name, .. } if name == "exp_avg.p0")
        );
        assert!(
            matches!(refuse(kind), TrainError::StateMismatch { name, .. } if name == "exp_avg.p0")
        );
        for ((_, before), (_, after)) in saved.iter().zip(optimizer.state()) {
            assert!(before.equal(&after));
        }
    }

    #[test]
    fn steps_run_on_meta_and_their_state_is_counted() {
        memory::observe();
        for name in ALL {
            let leaf = meta::empty(&[1 << 20, 1 << 10], Kind::Float).unwrap();
            let leaf = leaf.set_requires_grad(true);
            let parameter = Parameter::from_tensor("w", leaf.shallow_clone()).unwrap();
            (&leaf * 2.0).sum(Kind::Float).backward();
            let held = || memory::report().unwrap().held[2];
            let before = held();
            let mut optimizer = build(&config(name), vec![parameter]);
            let scale = leaf.grad().norm();
            optimizer.step(0.1, Some(&scale)).unwrap();
            optimizer.step(0.1, None).unwrap();
            assert_eq!(memory::KINDS[2], MemoryKind::Optimizer);
            let copies = match name {
                OptimizerName::AdamW | OptimizerName::Lamb => 2,
                OptimizerName::Sgd | OptimizerName::Lars => 1,
            };
            let (grown, expected) = (held() - before, copies << 32);
            assert!(grown.abs_diff(expected) <= 1024, "{name:?}: {grown}");
        }
    }
}
