//! The trust ratio of LAMB and LARS: how far a parameter may move, by how large it is.
//!
//! Norms are those of what this rank holds, which is the whole parameter. All of it is vectors with
//! one number per parameter, never read by the host.

use tch::{Kind, Tensor};
use trainyard_torch::kernel;

use crate::Result;

/// The norms of `tensors` as one vector, in double precision.
pub(super) fn norms(tensors: &[Tensor]) -> Result<Tensor> {
    let norms = kernel::foreach_norm(tensors)?;
    Ok(Tensor::f_stack(&norms, 0)?.f_to_kind(Kind::Double)?)
}

/// `numerator / denominator`, or 1 where either is not positive: a parameter that is all zeros must
/// be able to leave zero.
pub(super) fn ratio_or_one(numerator: &Tensor, denominator: &Tensor) -> Result<Tensor> {
    // In arithmetic, since meta tensors know no selection.
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
    fn zeros_are_trusted_fully() {
        let vector = |v: &[f64]| Tensor::from_slice(v);
        let ratio = ratio_or_one(
            &vector(&[6.0, 0.0, 5.0, 0.0]),
            &vector(&[2.0, 3.0, 0.0, 0.0]),
        );
        let ratio = Vec::<f64>::try_from(ratio.unwrap()).unwrap();
        assert_eq!(ratio, [3.0, 1.0, 1.0, 1.0]);
    }
}
