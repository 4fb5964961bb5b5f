//! Attention of some queries to some keys, and how the results for one query are put together.

use tch::{Kind, Tensor};
use trainyard_torch::TorchError;

use crate::loss::wide;

/// Attention to some of the keys a query will see.
pub(super) struct Attended {
    /// [batch, heads, positions, head_dim], as if there were no other keys.
    pub out: Tensor,
    /// [batch, heads, positions]: the logarithm of the sum of all exponentials.
    pub lse: Tensor,
}

/// Gradients of one block.
pub(super) struct Gradients {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
}

/// Attention on [batch, heads, positions, head_dim]; keys and values may have fewer heads.
pub(super) fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    causal: bool,
) -> Result<Attended, TorchError> {
    let (k, v) = (repeated(k, q)?, repeated(v, q)?);
    let (out, lse) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
        q,
        &k,
        &v,
        0.0,
        causal,
        None::<&Tensor>,
        None,
    )?;
    Ok(Attended { out, lse })
}

/// The gradients of one block, given what all blocks together made: with the overall logarithm of
/// sums, a block's share of the softmax is what it is in the whole.
pub(super) fn attend_backward(
    gradient: &Tensor,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    whole: &Attended,
    causal: bool,
) -> Result<Gradients, TorchError> {
    let (all_k, all_v) = (repeated(k, q)?, repeated(v, q)?);
    let (d_q, d_k, d_v) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward(
        gradient,
        q,
        &all_k,
        &all_v,
        &whole.out,
        &whole.lse,
        0.0,
        causal,
        None::<&Tensor>,
        None,
    )?;
    Ok(Gradients {
        q: d_q,
        k: summed(&d_k, k)?,
        v: summed(&d_v, v)?,
    })
}

impl Attended {
    /// The same in at least single precision, to be merged into.
    pub(super) fn widened(self) -> Result<Attended, TorchError> {
        Ok(Attended {
            out: self.out.f_to_kind(wide(self.out.kind()))?,
            lse: self.lse,
        })
    }

    /// The part for some of the queries; shares memory.
    pub(super) fn narrow(&self, start: i64, length: i64) -> Result<Attended, TorchError> {
        Ok(Attended {
            out: self.out.f_narrow(2, start, length)?,
            lse: self.lse.f_narrow(2, start, length)?,
        })
    }

    /// Takes in attention of the same queries to other keys.
    pub(super) fn merge(&mut self, other: &Attended) -> Result<(), TorchError> {
        let lse = self.lse.f_logaddexp(&other.lse)?;
        let share = |lse_of: &Tensor| -> Result<Tensor, TorchError> {
            Ok(lse_of.f_sub(&lse)?.f_exp()?.f_unsqueeze(-1)?)
        };
        let (own, others) = (share(&self.lse)?, share(&other.lse)?);
        let _ = self.out.f_mul_(&own)?;
        let _ = self.out.f_add_(&other.out.f_mul(&others)?)?;
        self.lse.f_copy_(&lse)?;
        Ok(())
    }
}

/// Every head of `kv` as often as queries share it.
fn repeated(kv: &Tensor, q: &Tensor) -> Result<Tensor, TorchError> {
    let (batch, heads, length, dim) = kv.size4()?;
    let groups = num_groups(q, heads);
    if groups == 1 {
        return Ok(kv.shallow_clone());
    }
    let spread = [batch, heads, groups, length, dim];
    Ok(kv
        .f_unsqueeze(2)?
        .f_expand(spread, false)?
        .f_flatten(1, 2)?)
}

/// The gradients of repeated heads, added up.
fn summed(gradient: &Tensor, kv: &Tensor) -> Result<Tensor, TorchError> {
    let (_, heads, _, _) = kv.size4()?;
    let groups = num_groups(gradient, heads);
    if groups == 1 {
        return Ok(gradient.shallow_clone());
    }
    let spread = gradient.f_unflatten(1, [heads, groups])?;
    Ok(spread.f_sum_dim_intlist([2i64].as_slice(), false, None::<Kind>)?)
}

fn num_groups(q: &Tensor, kv_heads: i64) -> i64 {
    q.size().get(1).copied().unwrap_or(0) / kv_heads.max(1)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn two_halves_of_the_keys_make_the_whole_forward_and_backward() -> Result<(), TorchError> {
        let options = (Kind::Double, Device::Cpu);
        let q = Tensor::randn([2, 4, 6, 8], options);
        let (k, v) = (
            Tensor::randn([2, 2, 10, 8], options),
            Tensor::randn([2, 2, 10, 8], options),
        );
        let gradient = Tensor::randn([2, 4, 6, 8], options);
        let whole = attend(&q, &k, &v, false)?;
        let expected = attend_backward(&gradient, (&q, &k, &v), &whole, false)?;

        let half = |t: &Tensor, start| t.narrow(2, start, 5);
        let mut merged = attend(&q, &half(&k, 0), &half(&v, 0), false)?.widened()?;
        merged.merge(&attend(&q, &half(&k, 5), &half(&v, 5), false)?)?;
        assert!(merged.out.allclose(&whole.out, 1e-12, 1e-12, false));
        assert!(merged.lse.allclose(&whole.lse, 1e-12, 1e-12, false));

        let part = |start| {
            attend_backward(
                &gradient,
                (&q, &half(&k, start), &half(&v, start)),
                &merged,
                false,
            )
        };
        let (first, second) = (part(0)?, part(5)?);
        assert!((first.q + second.q).allclose(&expected.q, 1e-12, 1e-12, false));
        let joined = |a: &Tensor, b: &Tensor| Tensor::cat(&[a, b], 2);
        assert!(joined(&first.k, &second.k).allclose(&expected.k, 1e-12, 1e-12, false));
        assert!(joined(&first.v, &second.v).allclose(&expected.v, 1e-12, 1e-12, false));
        Ok(())
    }
}
