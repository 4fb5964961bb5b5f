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
        (None, Some(window)) => by_heads(q, k, v, |q, k, v| windowed_attention(q, k, v, window)),
        (Some(_), Some(_)) => Err(NnError::DocumentMaskInWindow),
    }
}

/// Attention of every position to the `window` positions that end with it, on [batch, heads, positions, head_dim].
fn windowed_attention(q: &Tensor, k: &Tensor, v: &Tensor, window: usize) -> Result<Tensor> {
    // The meta device has no kernel for attention with a mask; shapes are the same without it.
    if meta::is_meta(q) {
        return Ok(kernel::attention(q, k, v, true)?);
    }
    let length = q.size().get(2).copied().unwrap_or(0);
    let all = Tensor::f_ones([length, length], (Kind::Bool, q.device()))?;
    let mask = all.f_tril(0)?.f_triu(1 - window as i64)?;
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
