//! The trust ratio of LAMB and LARS: the norm of a parameter relative to the norm of its update.
//!
//! Norms are computed on this rank only, so parameters must not be sharded. Values are vectors with one
//! element per parameter, and the host never reads them.

use tch::{Kind, Tensor};
use trainyard_torch::kernel;

use crate::Result;

/// Whether a flag on the device is set; waits for it.
pub(super) fn is_set(flag: Option<&Tensor>) -> Result<bool> {
    Ok(match flag {
        Some(flag) => f64::try_from(flag)? != 0.0,
        None => false,
    })
}

/// The norms of `tensors` as one float64 vector.
pub(super) fn norms(tensors: &[Tensor]) -> Result<Tensor> {
    let norms = kernel::foreach_norm(tensors)?;
    Ok(Tensor::f_stack(&norms, 0)?.f_to_kind(Kind::Double)?)
}

/// `numerator / denominator`, or 1 if either is not positive, so that a parameter of all zeros can change.
pub(super) fn ratio_or_one(numerator: &Tensor, denominator: &Tensor) -> Result<Tensor> {
    // Computed by arithmetic, because selection does not work on meta tensors.
    let usable = numerator.f_minimum(denominator)?.f_gt(0.0)?;
    let usable = usable.f_to_kind(Kind::Double)?;
    let unusable = usable.f_neg()?.f_add_scalar(1)?;
    let or_one = |x: &Tensor| x.f_mul(&usable)?.f_add(&unusable);
    Ok(or_one(numerator)?.f_div(&or_one(denominator)?)?)
}

/// The elements of a vector, each a scalar tensor of `kind`.
pub(super) fn elements(vector: &Tensor, kind: Kind) -> Result<Vec<Tensor>> {
    Ok(vector.f_to_kind(kind)?.f_unbind(0)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_of_zeros_is_one() {
        let vector = |v: &[f64]| Tensor::from_slice(v);
        let ratio = ratio_or_one(
            &vector(&[6.0, 0.0, 5.0, 0.0]),
            &vector(&[2.0, 3.0, 0.0, 0.0]),
        );
        let ratio = Vec::<f64>::try_from(ratio.unwrap()).unwrap();
        assert_eq!(ratio, [3.0, 1.0, 1.0, 1.0]);
    }
}
