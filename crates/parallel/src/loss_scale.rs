//! Dynamic loss scaling for float16, as PyTorch's `GradScaler`.
//!
//! The loss is multiplied by a scale before backward, so that small gradients do not underflow, and gradients are
//! divided by it afterwards. If a gradient overflows, the step is skipped and the scale halved; after many good
//! steps it is doubled. The decision depends only on the norm of the global gradient, which is the same number on
//! every rank, so ranks cannot disagree.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::Result;

/// The loss scale, and the number of steps since the last overflow.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    scale: f64,
    num_good: u32,
}

/// Whether to take an optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepDecision {
    /// All gradients are finite.
    Take,
    /// A gradient overflowed: the step must be skipped.
    Skip,
}

impl LossScale {
    /// The initial scale of PyTorch's `GradScaler`.
    const INITIAL: f64 = 65536.0;
    /// Number of good steps after which the scale is doubled.
    const INTERVAL: u32 = 2000;

    /// The current scale.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Decides on a step by the norm of its global gradient, and updates the scale.
    pub fn update(&mut self, norm: f64) -> StepDecision {
        if !norm.is_finite() {
            // Never zero, which doubling could not leave.
            self.scale = (self.scale / 2.0).max(f64::MIN_POSITIVE);
            self.num_good = 0;
            return StepDecision::Skip;
        }
        self.num_good += 1;
        if self.num_good == Self::INTERVAL {
            self.scale *= 2.0;
            self.num_good = 0;
        }
        StepDecision::Take
    }
}

impl Default for LossScale {
    fn default() -> Self {
        LossScale {
            scale: Self::INITIAL,
            num_good: 0,
        }
    }
}

/// Multiplies a tensor by a factor; a factor of one costs nothing.
pub fn scaled(tensor: &Tensor, factor: f64) -> Result<Tensor> {
    if factor == 1.0 {
        Ok(tensor.shallow_clone())
    } else {
        Ok(tensor.f_mul_scalar(factor)?)
    }
}

/// The loss from which backward starts: `loss` times `scale`. If `is_guarded`, a loss that is not finite has gradients of
/// NaN, which every rank sees after their reduction; gradients of an infinite loss may be finite otherwise.
pub(crate) fn backward_loss(loss: &Tensor, scale: f64, is_guarded: bool) -> Result<Tensor> {
    if !is_guarded {
        return scaled(loss, scale);
    }
    // Exactly `scale` for a finite loss.
    let factor = loss.f_detach()?.f_mul_scalar(0.0)?.f_add_scalar(scale)?;
    Ok(loss.f_mul(&factor)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_infinite_loss_has_no_finite_gradients() -> Result<()> {
        let gradient = |offset: f64, is_guarded| -> Result<f64> {
            let x = Tensor::from(1.0).set_requires_grad(true);
            let loss = &x + offset;
            backward_loss(&loss, 3.0, is_guarded)?.backward();
            Ok(x.grad().double_value(&[]))
        };
        assert_eq!(gradient(2.0, true)?, 3.0);
        assert_eq!(gradient(f64::INFINITY, false)?, 3.0);
        assert!(gradient(f64::INFINITY, true)?.is_nan());
        Ok(())
    }

    #[test]
    fn overflow_halves_the_scale_and_good_steps_double_it() {
        let mut scale = LossScale::default();
        assert_eq!(scale.update(f64::INFINITY), StepDecision::Skip);
        assert_eq!(scale.update(f64::NAN), StepDecision::Skip);
        assert_eq!(scale.scale(), 16384.0);
        for _ in 0..LossScale::INTERVAL {
            assert_eq!(scale.update(1.0), StepDecision::Take);
        }
        assert_eq!(scale.scale(), 32768.0);
    }

    proptest! {
        #[test]
        fn ranks_with_the_same_norms_have_the_same_scale(norms in prop::collection::vec(any::<f64>(), 0..50)) {
            let (mut one, mut other) = (LossScale::default(), LossScale::default());
            for norm in norms {
                prop_assert_eq!(one.update(norm), other.update(norm));
                prop_assert_eq!(one, other);
                prop_assert!(one.scale() > 0.0);
            }
        }
    }
}
