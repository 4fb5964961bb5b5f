//! The flag that gradients are not finite, for update rules without a fused kernel that reads it.

use tch::Tensor;

use crate::Result;

/// Whether a flag on the device is set; waits for it.
pub(crate) fn is_set(flag: Option<&Tensor>) -> Result<bool> {
    Ok(match flag {
        Some(flag) => f64::try_from(flag)? != 0.0,
        None => false,
    })
}
