//! Context parallelism: ranks that share every sequence.
//!
//! Every rank has some positions of each sequence and computes everything but attention with them
//! alone. Attention needs the keys and values of all earlier positions, which reach a rank in one of
//! two ways:
//!
//! - [`Method::Ring`]: keys and values go round; each rank attends with its own queries to whatever
//!   has arrived and merges the results. A causal mask leaves early positions less to do, so a rank
//!   has one chunk from the head of the sequence and its mirror image from the tail.
//! - [`Method::Ulysses`]: ranks exchange positions for heads, attend to whole sequences with some
//!   heads each, and exchange back. As many ranks as there are heads, at most.
//!
//! The loss is each rank's own positions' part of the whole, like that of a part of the batch: over
//! the ranks that share a sequence gradients are added up just as over those that share a batch.

mod block;
mod order;
mod ring;
mod ulysses;

use std::fmt;
use std::ops::Range;

use tch::Tensor;
use trainyard_torch::{Group, kernel};

use crate::{Documents, NnError, Result};

/// How keys and values of other ranks' positions are reached.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum Method {
    /// Keys and values go round.
    #[default]
    Ring,
    /// Positions are exchanged for heads.
    Ulysses,
}

/// The ranks that share every sequence, or this rank alone. Cloning shares them.
#[derive(Clone, Default)]
pub struct ContextParallel(Option<Ranks>);

#[derive(Clone)]
struct Ranks {
    group: Group,
    method: Method,
}

impl ContextParallel {
    /// Sequences are whole.
    pub fn alone() -> ContextParallel {
        ContextParallel(None)
    }

    /// Sequences are shared by the ranks of `group`.
    pub fn new(group: &Group, method: Method) -> ContextParallel {
        ContextParallel((group.size() > 1).then(|| Ranks {
            group: group.clone(),
            method,
        }))
    }

    /// How many ranks share a sequence.
    pub fn size(&self) -> usize {
        self.0.as_ref().map_or(1, |ranks| ranks.group.size())
    }

    /// How they share it; none where there is one rank.
    pub fn method(&self) -> Option<Method> {
        self.0.as_ref().map(|ranks| ranks.method)
    }

    /// The positions this rank has of a sequence of `length`, in the order in which it has them.
    pub fn positions(&self, length: usize) -> Result<Vec<Range<usize>>> {
        let Some(Ranks { group, method }) = &self.0 else {
            return Ok(std::iter::once(0..length).collect());
        };
        order::positions(*method, length, group.size(), group.index()).ok_or_else(|| {
            NnError::Uneven {
                what: "positions of a sequence".to_owned(),
                length,
                num_ranks: group.size() * order::chunks_per_rank(*method),
            }
        })
    }

    /// This rank's positions of `sequences` [batch, positions, ..].
    pub fn part(&self, sequences: &Tensor) -> Result<Tensor> {
        if self.0.is_none() {
            return Ok(sequences.shallow_clone());
        }
        let length = sequences.size().get(1).copied().unwrap_or(0);
        let parts = self.positions(length as usize)?.into_iter();
        let parts = parts.map(|p| sequences.f_narrow(1, p.start as i64, p.len() as i64));
        Ok(Tensor::f_cat(&parts.collect::<Result<Vec<_>, _>>()?, 1)?)
    }

    /// Causal attention of this rank's positions to all of the sequence, or of their document, on
    /// [batch, positions, heads, head_dim].
    pub fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        documents: Option<&Documents>,
    ) -> Result<Tensor> {
        let documents = documents.filter(|documents| !documents.are_sequences());
        let Some(ranks) = &self.0 else {
            return whole(q, k, v, documents);
        };
        let group = &ranks.group;
        match (ranks.method, documents) {
            (Method::Ring, None) => by_heads(q, k, v, |q, k, v| ring::attention(group, q, k, v)),
            (Method::Ring, Some(_)) => Err(NnError::DocumentsInARing),
            (Method::Ulysses, _) => {
                ulysses::attention(group, q, k, v, |q, k, v| whole(q, k, v, documents))
            }
        }
    }
}

/// Attention where this rank has whole sequences.
fn whole(q: &Tensor, k: &Tensor, v: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
    match documents {
        Some(documents) => documents.attention(q, k, v),
        None => by_heads(q, k, v, |q, k, v| Ok(kernel::attention(q, k, v, true)?)),
    }
}

/// Attention on [batch, heads, positions, head_dim], from and to positions before heads.
fn by_heads(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    attention: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let turned = |t: &Tensor| t.f_transpose(1, 2);
    Ok(attention(&turned(q)?, &turned(k)?, &turned(v)?)?.f_transpose(1, 2)?)
}

impl fmt::Debug for ContextParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContextParallel({}, {:?})", self.size(), self.method())
    }
}
