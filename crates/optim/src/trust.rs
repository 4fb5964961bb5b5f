//! The trust ratio of LAMB and LARS: the norm of a parameter relative to the norm of its update.
//!
//! Norms are those of full parameters, whichever ranks hold their shards. The host never reads them.

use tch::{Kind, Tensor};
use trainyard_nn::Parameter;
use trainyard_torch::{kernel, scalar};

use crate::Result;
use crate::batch::Batch;
use crate::shard_groups::ShardGroups;

/// A zero for each parameter. Every rank reduces the norms of all parameters, also of those without a gradient, so that all
/// send the same.
pub(crate) fn zero_norms<'a>(
    parameters: impl Iterator<Item = &'a Parameter>,
) -> Result<Vec<Tensor>> {
    let zero =
        |parameter: &Parameter| Ok(scalar::zero_like(parameter.tensor())?.f_to_kind(Kind::Double)?);
    parameters.map(zero).collect()
}

/// The norms of full parameters and of their updates, as two float64 vectors per batch. `updates` has one list per batch;
/// `zeros` has one number per parameter of the optimizer.
pub(crate) fn full_norms<const N: usize>(
    batches: &[Batch<N>],
    updates: &[Vec<Tensor>],
    shards: &ShardGroups,
    zeros: Vec<Tensor>,
) -> Result<Vec<[Tensor; 2]>> {
    let copy = zeros.iter().map(Tensor::shallow_clone).collect();
    let mut lists = [zeros, copy];
    for (batch, updates) in batches.iter().zip(updates) {
        for (list, tensors) in lists.iter_mut().zip([&batch.parameters, updates]) {
            for (&index, norm) in batch.indices.iter().zip(kernel::foreach_norm(tensors)?) {
                list[index] = norm.f_to_kind(Kind::Double)?;
            }
        }
    }
    let [weights, updates] = shards.full_norms(lists)?;
    let of_batch = |batch: &Batch<N>| -> Result<[Tensor; 2]> {
        let stacked = |list: &[Tensor]| {
            let own: Vec<&Tensor> = batch.indices.iter().map(|&index| &list[index]).collect();
            Tensor::f_stack(&own, 0)
        };
        Ok([stacked(&weights)?, stacked(&updates)?])
    };
    batches.iter().map(of_batch).collect()
}

/// `numerator / denominator`, or 1 if either is not positive, so that a parameter of all zeros can change.
pub(crate) fn ratio_or_one(numerator: &Tensor, denominator: &Tensor) -> Result<Tensor> {
    // Computed by arithmetic, because selection does not work on meta tensors.
    let usable = numerator.f_minimum(denominator)?.f_gt(0.0)?;
    let usable = usable.f_to_kind(Kind::Double)?;
    let unusable = usable.f_neg()?.f_add_scalar(1)?;
    let or_one = |x: &Tensor| x.f_mul(&usable)?.f_add(&unusable);
    Ok(or_one(numerator)?.f_div(&or_one(denominator)?)?)
}

/// The elements of a vector, each a scalar tensor of `kind`.
pub(crate) fn elements(vector: &Tensor, kind: Kind) -> Result<Vec<Tensor>> {
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
