//! Attention of some queries to a block of keys, and merging of the results for several blocks.

use tch::{Kind, Tensor};
use trainyard_torch::{TorchError, kernel};

use crate::loss::wide;

/// The attention of queries to some of their keys.
pub(super) struct PartialAttention {
    /// [batch, heads, positions, head_dim], normalized over these keys only.
    pub out: Tensor,
    /// [batch, heads, positions]: the log-sum-exp of the scores.
    pub lse: Tensor,
}

/// The gradients of one block.
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
) -> Result<PartialAttention, TorchError> {
    let (k, v) = (repeated(k, q)?, repeated(v, q)?);
    let (out, lse) = kernel::attention_block(q, &k, &v, causal)?;
    Ok(PartialAttention { out, lse })
}

/// The gradients of one block, given the merged attention of all blocks: with the overall log-sum-exp, the block's
/// softmax weights are those of the full attention.
pub(super) fn attend_backward(
    gradient: &Tensor,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    full: &PartialAttention,
    causal: bool,
) -> Result<Gradients, TorchError> {
    let (all_k, all_v) = (repeated(k, q)?, repeated(v, q)?);
    let [d_q, d_k, d_v] = kernel::attention_block_backward(
        gradient,
        (q, &all_k, &all_v),
        (&full.out, &full.lse),
        causal,
    )?;
    Ok(Gradients {
        q: d_q,
        k: summed(&d_k, k)?,
        v: summed(&d_v, v)?,
    })
}

impl PartialAttention {
    /// The same in at least fp32, to merge into.
    pub(super) fn widened(self) -> Result<PartialAttention, TorchError> {
        Ok(PartialAttention {
            out: self.out.f_to_kind(wide(self.out.kind()))?,
            lse: self.lse,
        })
    }

    /// The result for some of the queries; shares memory.
    pub(super) fn narrow(&self, start: i64, length: i64) -> Result<PartialAttention, TorchError> {
        Ok(PartialAttention {
            out: self.out.f_narrow(2, start, length)?,
            lse: self.lse.f_narrow(2, start, length)?,
        })
    }

    /// Merges the attention of the same queries to other keys.
    pub(super) fn merge(&mut self, other: &PartialAttention) -> Result<(), TorchError> {
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

/// Repeats every KV head for the query heads that share it.
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

/// Sums the gradients of repeated heads.
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
    fn merging_two_blocks_equals_full_attention_forward_and_backward() -> Result<(), TorchError> {
        let options = (Kind::Double, Device::Cpu);
        let q = Tensor::randn([2, 4, 6, 8], options);
        let (k, v) = (
            Tensor::randn([2, 2, 10, 8], options),
            Tensor::randn([2, 2, 10, 8], options),
        );
        let gradient = Tensor::randn([2, 4, 6, 8], options);
        let full = attend(&q, &k, &v, false)?;
        let expected = attend_backward(&gradient, (&q, &k, &v), &full, false)?;

        let half = |t: &Tensor, start| t.narrow(2, start, 5);
        let mut merged = attend(&q, &half(&k, 0), &half(&v, 0), false)?.widened()?;
        merged.merge(&attend(&q, &half(&k, 5), &half(&v, 5), false)?)?;
        assert!(merged.out.allclose(&full.out, 1e-12, 1e-12, false));
        assert!(merged.lse.allclose(&full.lse, 1e-12, 1e-12, false));

        let block = |start| {
            attend_backward(
                &gradient,
                (&q, &half(&k, start), &half(&v, start)),
                &merged,
                false,
            )
        };
        let (first, second) = (block(0)?, block(5)?);
        assert!((first.q + second.q).allclose(&expected.q, 1e-12, 1e-12, false));
        let joined = |a: &Tensor, b: &Tensor| Tensor::cat(&[a, b], 2);
        assert!(joined(&first.k, &second.k).allclose(&expected.k, 1e-12, 1e-12, false));
        assert!(joined(&first.v, &second.v).allclose(&expected.v, 1e-12, 1e-12, false));
        Ok(())
    }
}
