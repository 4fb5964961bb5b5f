//! Ulysses: positions are exchanged for heads, and back.

use tch::Tensor;
use trainyard_torch::{Group, TorchError, autograd};
use trainyard_trace::Purpose;

use crate::{NnError, Result};

/// Attention of this rank's positions to all of them, on [batch, positions, heads, head_dim]; `whole`
/// computes it for some heads of whole sequences.
pub(super) fn attention(
    group: &Group,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    whole: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let size = group.size() as i64;
    let heads = [divided(q, size)?, spread(k, size)?, spread(v, size)?];
    // One message for all three.
    let numbers = heads.each_ref().map(|t| t.size()[3]);
    let all = to_heads(group, &Tensor::f_cat(&heads, 3)?)?;
    let split = all.f_split_with_sizes(&numbers[..], 2)?;
    let mixed = whole(&split[0], &split[1], &split[2])?;
    to_positions(group, &mixed)
}

/// [batch, positions, heads, dim] as [batch, positions, ranks, heads of one rank, dim].
fn divided(heads: &Tensor, size: i64) -> Result<Tensor> {
    let (_, _, number, _) = heads.size4()?;
    if number % size != 0 {
        return Err(NnError::Uneven {
            what: "heads of attention".to_owned(),
            length: number as usize,
            num_ranks: size as usize,
        });
    }
    Ok(heads.f_unflatten(2, [size, number / size])?)
}

/// The same for keys or values; where there are fewer heads than ranks, several get the same.
fn spread(heads: &Tensor, size: i64) -> Result<Tensor> {
    let (batch, positions, number, dim) = heads.size4()?;
    if number >= size || size % number != 0 {
        return divided(heads, size);
    }
    let copies = [batch, positions, number, size / number, dim];
    let spread = heads.f_unsqueeze(3)?.f_expand(copies, false)?;
    Ok(spread.f_flatten(2, 3)?.f_unsqueeze(3)?)
}

/// From this rank's positions of all heads [batch, positions, ranks, heads, dim] to all positions of
/// this rank's heads [batch, all positions, heads, dim].
fn to_heads(group: &Group, x: &Tensor) -> Result<Tensor> {
    exchanged(group, x, scatter_heads, scatter_positions)
}

/// The way back, to [batch, positions, ranks · heads, dim].
fn to_positions(group: &Group, x: &Tensor) -> Result<Tensor> {
    Ok(exchanged(group, x, scatter_positions, scatter_heads)?.f_flatten(2, 3)?)
}

type Exchange = fn(&Group, &Tensor) -> Result<Tensor, TorchError>;

/// An exchange, whose backward is the opposite one.
fn exchanged(group: &Group, x: &Tensor, way: Exchange, back: Exchange) -> Result<Tensor> {
    let later = group.clone();
    Ok(autograd::single(
        &[x],
        |_, inputs| way(group, inputs[0]),
        move |_, gradients| match gradients {
            [Some(gradient)] => Ok(vec![Some(back(&later, gradient)?)]),
            _ => Ok(vec![None]),
        },
    )?)
}

fn scatter_heads(group: &Group, x: &Tensor) -> Result<Tensor, TorchError> {
    let by_rank = x.f_permute([2, 0, 1, 3, 4])?.f_contiguous()?;
    // What comes from a rank are its positions, which follow those of the ranks before it.
    let found = sent_around(group, &by_rank)?.f_transpose(0, 1)?;
    Ok(found.f_flatten(1, 2)?)
}

fn scatter_positions(group: &Group, x: &Tensor) -> Result<Tensor, TorchError> {
    let by_rank = x.f_unflatten(1, [group.size() as i64, -1])?;
    let by_rank = by_rank.f_transpose(0, 1)?.f_contiguous()?;
    // What comes from a rank are its heads.
    Ok(sent_around(group, &by_rank)?.f_permute([1, 2, 0, 3, 4])?)
}

/// Row `r` goes to rank `r`; the row that comes from it takes its place.
fn sent_around(group: &Group, by_rank: &Tensor) -> Result<Tensor, TorchError> {
    let out = by_rank.f_empty_like()?;
    let one_each = vec![1; group.size()];
    group
        .all_to_all(&out, by_rank, &one_each, &one_each, Purpose::Activation)?
        .wait()?;
    Ok(out)
}
