//! Ulysses attention (DeepSpeed): an all-to-all exchanges positions for heads before attention, and another exchanges
//! them back.

use tch::Tensor;
use trainyard_torch::{Group, TorchError, autograd};
use trainyard_trace::Purpose;

use crate::{NnError, Result};

/// Attention of this rank's positions to the whole sequence, on [batch, positions, heads, head_dim];
/// `local_attention` computes it for some heads of full sequences.
pub(super) fn attention(
    group: &Group,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    local_attention: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let size = group.size() as i64;
    let heads = [
        split_heads(q, size)?,
        split_kv_heads(k, size)?,
        split_kv_heads(v, size)?,
    ];
    // One all-to-all for all three.
    let numbers = heads.each_ref().map(|t| t.size()[3]);
    let all = to_heads(group, &Tensor::f_cat(&heads, 3)?)?;
    let split = all.f_split_with_sizes(&numbers[..], 2)?;
    let output = local_attention(&split[0], &split[1], &split[2])?;
    to_positions(group, &output)
}

/// Reshapes [batch, positions, heads, dim] to [batch, positions, ranks, heads of one rank, dim].
fn split_heads(heads: &Tensor, size: i64) -> Result<Tensor> {
    let (_, _, number, _) = heads.size4()?;
    if number % size != 0 {
        return Err(NnError::NotDivisible {
            what: "attention heads".to_owned(),
            length: number as usize,
            num_ranks: size as usize,
        });
    }
    Ok(heads.f_unflatten(2, [size, number / size])?)
}

/// The same for keys or values; if there are fewer heads than ranks, several ranks get the same head.
fn split_kv_heads(heads: &Tensor, size: i64) -> Result<Tensor> {
    let (batch, positions, number, dim) = heads.size4()?;
    if number >= size || size % number != 0 {
        return split_heads(heads, size);
    }
    let copies = [batch, positions, number, size / number, dim];
    let repeated = heads.f_unsqueeze(3)?.f_expand(copies, false)?;
    Ok(repeated.f_flatten(2, 3)?.f_unsqueeze(3)?)
}

/// From this rank's positions of all heads [batch, positions, ranks, heads, dim] to all positions of this rank's
/// heads [batch, all positions, heads, dim].
fn to_heads(group: &Group, x: &Tensor) -> Result<Tensor> {
    all_to_all_apply(group, x, scatter_heads, scatter_positions)
}

/// The inverse, to [batch, positions, ranks · heads, dim].
fn to_positions(group: &Group, x: &Tensor) -> Result<Tensor> {
    Ok(all_to_all_apply(group, x, scatter_positions, scatter_heads)?.f_flatten(2, 3)?)
}

type AllToAll = fn(&Group, &Tensor) -> Result<Tensor, TorchError>;

/// An all-to-all as an autograd function, whose backward is the inverse one.
fn all_to_all_apply(
    group: &Group,
    x: &Tensor,
    forward: AllToAll,
    inverse: AllToAll,
) -> Result<Tensor> {
    let backward_group = group.clone();
    Ok(autograd::apply(
        &[x],
        |_, inputs| forward(group, inputs[0]),
        move |_, gradients| match gradients {
            [Some(gradient)] => Ok(vec![Some(inverse(&backward_group, gradient)?)]),
            _ => Ok(vec![None]),
        },
    )?)
}

fn scatter_heads(group: &Group, x: &Tensor) -> Result<Tensor, TorchError> {
    let by_rank = x.f_permute([2, 0, 1, 3, 4])?.f_contiguous()?;
    // Each rank sends its positions, which follow those of the ranks before it.
    let found = all_to_all(group, &by_rank)?.f_transpose(0, 1)?;
    Ok(found.f_flatten(1, 2)?)
}

fn scatter_positions(group: &Group, x: &Tensor) -> Result<Tensor, TorchError> {
    let by_rank = x.f_unflatten(1, [group.size() as i64, -1])?;
    let by_rank = by_rank.f_transpose(0, 1)?.f_contiguous()?;
    // Each rank sends its heads.
    Ok(all_to_all(group, &by_rank)?.f_permute([1, 2, 0, 3, 4])?)
}

/// Sends row `r` to rank `r` and receives a row from each.
fn all_to_all(group: &Group, by_rank: &Tensor) -> Result<Tensor, TorchError> {
    let out = by_rank.f_empty_like()?;
    let one_each = vec![1; group.size()];
    group
        .on_caller()
        .all_to_all(&out, by_rank, &one_each, &one_each, Purpose::Activation)?
        .wait()?;
    Ok(out)
}
