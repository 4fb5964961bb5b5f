//! The optimizer of a config.

use trainyard_config::{Choice, OptimizerImplementation, OptimizerName, OptimizerSection};
use trainyard_nn::Parameter;
use trainyard_optim::{
    AdamW, AdamWConfig, Lamb, Lars, LarsConfig, Lion, LionConfig, LrAdjustment, Muon, MuonConfig,
    Optimizer, Sgd, SgdConfig,
};
use trainyard_torch::World;

use crate::Result;
use crate::train_spec::TrainSpec;

/// Builds the optimizer of a config for parameters that may be sharded over ranks of `world`.
pub fn build(
    spec: &TrainSpec,
    parameters: Vec<Parameter>,
    world: &World,
) -> Result<Box<dyn Optimizer>> {
    let config = &spec.optimizer;
    let name = match &config.name {
        Choice::Builtin(name) => *name,
        Choice::Custom(name) => {
            let registry = spec.registry();
            return registry.build_optimizer(name, spec, parameters, world);
        }
    };
    warn_if_ignored(config);
    let adamw = AdamWConfig {
        beta1: config.beta1,
        beta2: config.beta2,
        eps: config.eps,
        weight_decay: config.weight_decay,
    };
    let (momentum, weight_decay) = (config.momentum, config.weight_decay);
    Ok(match name {
        OptimizerName::AdamW => Box::new(AdamW::new(parameters, adamw)),
        OptimizerName::Sgd => {
            let config = SgdConfig {
                momentum,
                weight_decay,
                nesterov: config.nesterov.unwrap_or(false),
            };
            Box::new(Sgd::new(parameters, config))
        }
        OptimizerName::Lamb => Box::new(Lamb::new(parameters, adamw, world)?),
        OptimizerName::Lars => {
            let config = LarsConfig {
                momentum,
                weight_decay,
                eps: config.eps,
                ..LarsConfig::default()
            };
            Box::new(Lars::new(parameters, config, world)?)
        }
        OptimizerName::Lion => {
            let config = LionConfig {
                beta1: adamw.beta1,
                beta2: adamw.beta2,
                weight_decay,
            };
            Box::new(Lion::new(parameters, config))
        }
        OptimizerName::Muon => {
            let config = MuonConfig {
                momentum,
                weight_decay,
                nesterov: config.nesterov.unwrap_or(true),
                // One learning rate serves for matrices and for the rest.
                lr_adjustment: LrAdjustment::MatchRmsAdamW,
                adamw,
                ..MuonConfig::default()
            };
            Box::new(Muon::new(parameters, config, world)?)
        }
    })
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
