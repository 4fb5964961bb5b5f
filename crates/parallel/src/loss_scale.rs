//! Keeping small gradients above the smallest number of float16.
//!
//! The loss is multiplied by a scale before backward, and gradients are divided by it after. A scale
//! too large makes a gradient overflow: that step is skipped and the scale halved; a long run of good
//! steps doubles it. Whether a step is skipped is read off the norm of the global gradient, which is
//! the same number on every rank, so ranks cannot disagree.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::Result;

/// The scale, and how it has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    scale: f64,
    num_good: u32,
}

/// What a step's gradients allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// All finite: the step may be taken.
    Take,
    /// Something overflowed: the step must be skipped.
    Skip,
}

impl LossScale {
    /// As PyTorch's `GradScaler` begins.
    const FIRST: f64 = 65536.0;
    /// Good steps until the scale is doubled.
    const INTERVAL: u32 = 2000;

    /// The scale to multiply the loss by.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Judges a step by the norm of its global gradient, and sets the scale for the next.
    pub fn judge(&mut self, norm: f64) -> Verdict {
        if !norm.is_finite() {
            // Never to zero, from which no doubling leads back.
            self.scale = (self.scale / 2.0).max(f64::MIN_POSITIVE);
            self.num_good = 0;
            return Verdict::Skip;
        }
        self.num_good += 1;
        if self.num_good == Self::INTERVAL {
            self.scale *= 2.0;
            self.num_good = 0;
        }
        Verdict::Take
    }
}

impl Default for LossScale {
    fn default() -> Self {
        LossScale {
            scale: Self::FIRST,
            num_good: 0,
        }
    }
}

/// A number times a factor; most often by one, which changes nothing.
pub fn scaled(tensor: &Tensor, factor: f64) -> Result<Tensor> {
    match factor == 1.0 {
        true => Ok(tensor.shallow_clone()),
        false => Ok(tensor.f_mul_scalar(factor)?),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn overflow_halves_and_patience_doubles() {
        let mut scale = LossScale::default();
        assert_eq!(scale.judge(f64::INFINITY), Verdict::Skip);
        assert_eq!(scale.judge(f64::NAN), Verdict::Skip);
        assert_eq!(scale.scale(), 16384.0);
        for _ in 0..LossScale::INTERVAL {
            assert_eq!(scale.judge(1.0), Verdict::Take);
        }
        assert_eq!(scale.scale(), 32768.0);
    }

    proptest! {
        #[test]
        fn ranks_that_see_the_same_norms_stay_together(norms in prop::collection::vec(any::<f64>(), 0..50)) {
            let (mut one, mut other) = (LossScale::default(), LossScale::default());
            for norm in norms {
                prop_assert_eq!(one.judge(norm), other.judge(norm));
                prop_assert_eq!(one, other);
                prop_assert!(one.scale() > 0.0);
            }
        }
    }
}
