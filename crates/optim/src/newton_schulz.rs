//! The Newton-Schulz iteration, which makes a matrix nearly orthogonal.

use tch::{Kind, Tensor};

use crate::Result;

/// Coefficients of the quintic iteration (Jordan et al., 2024): steep at zero, so that few steps suffice.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];

/// The nearly orthogonal factor of every matrix of `matrices` [.., rows, columns]: singular values become about 1. As in
/// `torch.optim.Muon`, it is computed in bfloat16, except for matrices of float64.
pub(crate) fn orthogonalize(matrices: &Tensor, num_steps: usize, eps: f64) -> Result<Tensor> {
    let shape = matrices.size();
    let kind = match matrices.kind() {
        Kind::Double => Kind::Double,
        _ => Kind::BFloat16,
    };
    let [.., rows, columns] = shape[..] else {
        return Ok(matrices.shallow_clone());
    };
    let flipped = |x: &Tensor| -> Result<Tensor> {
        Ok(if rows > columns {
            x.f_transpose(-2, -1)?
        } else {
            x.shallow_clone()
        })
    };
    let [a, b, c] = COEFFICIENTS;
    let batch = matrices.f_to_kind(kind)?.f_view([-1, rows, columns])?;
    let mut x = flipped(&batch)?;
    let norm = x.f_norm_scalaropt_dim(2, [-2i64, -1].as_slice(), true)?;
    x = x.f_div(&norm.f_clamp_min(eps)?)?;
    for _ in 0..num_steps {
        let gram = x.f_bmm(&x.f_transpose(-2, -1)?)?;
        let update = gram.f_baddbmm(&gram, &gram, b, c)?;
        x = x.f_baddbmm(&update, &x, a, 1.0)?;
    }
    Ok(flipped(&x)?
        .f_reshape(&shape[..])?
        .f_to_kind(matrices.kind())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn singular_values_become_about_one() {
        tch::manual_seed(1);
        for shape in [[12, 5], [5, 12], [8, 8]] {
            let matrices = Tensor::randn(shape, (Kind::Double, tch::Device::Cpu));
            let found = orthogonalize(&matrices, 5, 1e-7).unwrap();
            let (_, values, _) = found.svd(true, false);
            let extreme = [values.min(), values.max()].map(|value| value.double_value(&[]));
            assert!(extreme[0] > 0.3 && extreme[1] < 1.6, "{extreme:?}");
        }
    }

    #[test]
    fn matrices_of_a_batch_are_independent() {
        let matrices = Tensor::randn([3, 4, 6], (Kind::Double, tch::Device::Cpu));
        let all = orthogonalize(&matrices, 5, 1e-7).unwrap();
        for index in 0..3 {
            let alone = orthogonalize(&matrices.get(index), 5, 1e-7).unwrap();
            assert!(all.get(index).allclose(&alone, 1e-12, 1e-12, false));
        }
    }
}
