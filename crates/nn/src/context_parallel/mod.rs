//! Context parallelism: the ranks of a group shard every sequence.
//!
//! Every rank has some positions of each sequence and computes everything but attention locally. Attention needs the
//! keys and values of all earlier positions. There are two methods:
//!
//! - [`ContextParallelMethod::Ring`]: keys and values move around a ring; each rank attends with its queries to the
//!   keys that have arrived and merges the results. With a causal mask, early positions have less work, so a rank has
//!   one chunk from the start of the sequence and its mirror image from the end.
//! - [`ContextParallelMethod::Ulysses`]: an all-to-all exchanges positions for heads, each rank attends to full
//!   sequences with some heads, and another all-to-all exchanges back. The number of ranks is at most the number of
//!   heads.
//!
//! The loss of a rank covers its own positions, like that of a part of the batch: gradients are reduced over
//! context-parallel ranks just as over data-parallel ranks.

mod block;
mod ring;
mod ulysses;
mod zigzag;

use std::fmt;
use std::ops::Range;

use tch::{Kind, Tensor};
use trainyard_torch::{Group, kernel, meta};

use crate::{Documents, NnError, Result};

/// How attention reaches the keys and values of other ranks.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum ContextParallelMethod {
    /// Ring attention: keys and values move around a ring.
    #[default]
    Ring,
    /// Ulysses: an all-to-all exchanges positions for heads.
    Ulysses,
}

/// The context-parallel group, or none. Clones share it.
#[derive(Clone, Default)]
pub struct ContextParallel(Option<Ranks>);

#[derive(Clone)]
struct Ranks {
    group: Group,
    method: ContextParallelMethod,
}

impl ContextParallel {
    /// No context parallelism: every rank has full sequences.
    pub fn disabled() -> ContextParallel {
        ContextParallel(None)
    }

    /// Shards sequences over the ranks of `group`.
    pub fn new(group: &Group, method: ContextParallelMethod) -> ContextParallel {
        ContextParallel((group.size() > 1).then(|| Ranks {
            group: group.clone(),
            method,
        }))
    }

    /// This rank's index in the group.
    pub fn index(&self) -> usize {
        self.0.as_ref().map_or(0, |ranks| ranks.group.index())
    }

    /// The number of context-parallel ranks.
    pub fn size(&self) -> usize {
        self.0.as_ref().map_or(1, |ranks| ranks.group.size())
    }

    /// The method; `None` without context parallelism.
    pub fn method(&self) -> Option<ContextParallelMethod> {
        self.0.as_ref().map(|ranks| ranks.method)
    }

    /// This rank's shard of `sequences` [batch, positions, ..].
    pub fn positions(&self, length: usize) -> Result<Vec<Range<usize>>> {
        let Some(Ranks { group, method }) = &self.0 else {
            return Ok(std::iter::once(0..length).collect());
        };
        zigzag::positions(*method, length, group.size(), group.index()).ok_or_else(|| {
            NnError::NotDivisible {
                what: "sequence length".to_owned(),
                length,
                num_ranks: group.size() * zigzag::chunks_per_rank(*method),
            }
        })
    }

    /// This rank's shard of `sequences` [batch, positions, ..].
    pub fn shard(&self, sequences: &Tensor) -> Result<Tensor> {
        if self.0.is_none() {
            return Ok(sequences.shallow_clone());
        }
        let length = sequences.size().get(1).copied().unwrap_or(0);
        let shards = self.positions(length as usize)?.into_iter();
        let shards = shards.map(|p| sequences.f_narrow(1, p.start as i64, p.len() as i64));
        Ok(Tensor::f_cat(&shards.collect::<Result<Vec<_>, _>>()?, 1)?)
    }

    /// Attention of this rank's positions to all of the sequence, on [batch, positions, heads, head_dim].
    pub fn bidirectional_attention(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let attend = |q: &Tensor, k: &Tensor, v: &Tensor| {
            by_heads(q, k, v, |q, k, v| Ok(kernel::attention(q, k, v, false)?))
        };
        match &self.0 {
            None => attend(q, k, v),
            Some(ranks) => match ranks.method {
                ContextParallelMethod::Ring => Err(NnError::BidirectionalInRing),
                ContextParallelMethod::Ulysses => ulysses::attention(&ranks.group, q, k, v, attend),
            },
        }
    }

    /// Causal attention of this rank's positions to the whole sequence, to their document, or to the last `window`
    /// positions, on [batch, positions, heads, head_dim].
    pub fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        documents: Option<&Documents>,
        window: Option<usize>,
    ) -> Result<Tensor> {
        let documents = documents.filter(|documents| !documents.is_trivial());
        let num_positions = q.size().get(1).copied().unwrap_or(0) as usize * self.size();
        let window = window.filter(|window| *window < num_positions);
        let Some(ranks) = &self.0 else {
            return local_attention(q, k, v, documents, window);
        };
        let group = &ranks.group;
        match ranks.method {
            ContextParallelMethod::Ring if documents.is_some() => Err(NnError::DocumentMaskInRing),
            ContextParallelMethod::Ring if window.is_some() => Err(NnError::WindowInRing),
            ContextParallelMethod::Ring => {
                by_heads(q, k, v, |q, k, v| ring::attention(group, q, k, v))
            }
            ContextParallelMethod::Ulysses => ulysses::attention(group, q, k, v, |q, k, v| {
                local_attention(q, k, v, documents, window)
            }),
        }
    }
}

/// Attention on full sequences.
fn local_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: Option<&Documents>,
    window: Option<usize>,
) -> Result<Tensor> {
    match (documents, window) {
        (None, None) => by_heads(q, k, v, |q, k, v| Ok(kernel::attention(q, k, v, true)?)),
        (Some(documents), None) => documents.attention(q, k, v),
        (None, Some(window)) => by_heads(q, k, v, |q, k, v| {
            windowed_attention(q, k, v, window, WINDOW_CHUNK)
        }),
        (Some(_), Some(_)) => Err(NnError::DocumentMaskInWindow),
    }
}

/// Positions that attend to their windows in one call. The mask of a call has as many rows, and a window more columns, so
/// that time and memory grow with the length of the sequence, not with its square.
const WINDOW_CHUNK: usize = 512;

/// Attention of every position to the `window` positions that end with it, on [batch, heads, positions, head_dim].
fn windowed_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    window: usize,
    chunk: usize,
) -> Result<Tensor> {
    let length = q.size().get(2).copied().unwrap_or(0);
    let (window, chunk) = (window as i64, chunk.max(window) as i64);
    let mut outputs = Vec::new();
    for start in (0..length).step_by(chunk as usize) {
        let end = (start + chunk).min(length);
        // The first key that a position of this chunk attends to.
        let first = (start + 1 - window).max(0);
        let keys = |t: &Tensor| t.f_narrow(2, first, end - first);
        let q = q.f_narrow(2, start, end - start)?;
        let (k, v) = (keys(k)?, keys(v)?);
        outputs.push(attention_to_last(&q, &k, &v, window, start - first)?);
    }
    match &outputs[..] {
        [only] => Ok(only.shallow_clone()),
        _ => Ok(Tensor::f_cat(&outputs, 2)?),
    }
}

/// Attention of query `i` to the `window` keys that end with key `i + offset`.
fn attention_to_last(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    window: i64,
    offset: i64,
) -> Result<Tensor> {
    // The meta device has no kernel for attention with a mask; shapes are the same without it.
    if meta::is_meta(q) {
        return Ok(kernel::attention(q, k, v, true)?);
    }
    let num_positions = |t: &Tensor| t.size().get(2).copied().unwrap_or(0);
    let all = Tensor::f_ones(
        [num_positions(q), num_positions(k)],
        (Kind::Bool, q.device()),
    )?;
    let mask = all.f_tril(offset)?.f_triu(offset + 1 - window)?;
    let is_grouped = q.size().get(1) != k.size().get(1);
    Ok(Tensor::f_scaled_dot_product_attention(
        q,
        k,
        v,
        Some(&mask),
        0.0,
        false,
        None,
        is_grouped,
    )?)
}

/// Transposes to [batch, heads, positions, head_dim] for attention, and back.
fn by_heads(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    attention: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let transposed = |t: &Tensor| t.f_transpose(1, 2);
    Ok(attention(&transposed(q)?, &transposed(k)?, &transposed(v)?)?.f_transpose(1, 2)?)
}

impl fmt::Debug for ContextParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContextParallel({}, {:?})", self.size(), self.method())
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn windows_in_chunks_equal_windows_at_once() {
        let random = |heads: i64| Tensor::randn([2, heads, 23, 4], (Kind::Double, Device::Cpu));
        let (q, k, v) = (random(4), random(2), random(2));
        for window in [1, 3, 7] {
            let at_once = windowed_attention(&q, &k, &v, window, 23).unwrap();
            for chunk in [1, 5, 7, 22] {
                let found = windowed_attention(&q, &k, &v, window, chunk).unwrap();
                assert!(
                    found.allclose(&at_once, 1e-12, 1e-12, false),
                    "window {window} in chunks of {chunk}"
                );
            }
        }
    }

    #[test]
    fn windows_in_chunks_have_a_shape_on_the_meta_device() {
        let empty = |heads| meta::empty(&[2, heads, 23, 4], Kind::Float).unwrap();
        let (q, k, v) = (empty(4), empty(2), empty(2));
        let found = windowed_attention(&q, &k, &v, 3, 5).unwrap();
        assert_eq!(found.size(), [2, 4, 23, 4]);
    }
}
