//! Loss scaling for a training loop of one's own, as PyTorch's `GradScaler`.

use tch::Tensor;
use trainyard_nn::Parameter;
use trainyard_optim::{DeviceScalars, Optimizer};
use trainyard_parallel::{LossScale, OptimizerStep, StepDecision, Strategy};
use trainyard_torch::{World, scalar};

use crate::Result;
use crate::clip::GradNorm;
use crate::value_guard::found_inf;

/// Scales losses before backward, so that gradients of float16 do not underflow, and steps the optimizer with the
/// gradients divided by the scale.
pub struct GradScaler {
    scale: LossScale,
    norm: GradNorm,
}

impl GradScaler {
    /// For the parameters of a wrapped model, whose layouts must be final.
    pub fn new(parameters: &[Parameter], world: &World) -> Result<GradScaler> {
        Ok(GradScaler {
            scale: LossScale::default(),
            norm: GradNorm::new(parameters, world)?,
        })
    }

    /// The scale and the number of steps since the last overflow, to be saved with a checkpoint.
    pub fn state(&self) -> LossScale {
        self.scale
    }

    /// Continues with a saved state.
    pub fn load_state(&mut self, state: LossScale) {
        self.scale = state;
    }

    /// The loss from which backward starts.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(loss.f_mul_scalar(self.scale.scale())?)
    }

    /// Steps the optimizer, unless a gradient overflowed on any rank, and adapts the scale. This is a collective call,
    /// and the host waits for the gradients.
    pub fn step(
        &mut self,
        model: &dyn Strategy,
        optimizer: &mut dyn Optimizer,
        lr: f64,
    ) -> Result<StepDecision> {
        let norm = self.norm.norm()?;
        let (scale, found_inf) = (scalar::like(&norm, self.scale.scale())?, found_inf(&norm)?);
        model.optimizer_step(&mut OptimizerStep {
            optimizer,
            lr,
            scalars: DeviceScalars {
                grad_scale: Some(&scale),
                found_inf: Some(&found_inf),
            },
        })?;
        Ok(self.scale.update(f64::try_from(norm)?))
    }
}
