//! Tensor parallelism: ranks that share every matrix of a model.
//!
//! Matrices come in pairs, cut so that nothing travels between the two. The first is cut by its
//! outputs ([`TensorParallel::columns`]), so every rank has some features of all positions; the
//! second by its inputs ([`TensorParallel::rows`]), so every rank has a term of the result, and the
//! terms are added up. Forward adds up after the second matrix, backward before the first: four
//! all-reduces per block and step.
//!
//! ```text
//!             columns                      rows
//!        ┌──────┬──────┐              ┌─────────────┐
//!   x ─▶ │ rank │ rank │ ─▶ features ▶ │   rank 0    │ ─▶ terms ─▶ sum
//!        │  0   │  1   │              ├─────────────┤
//!        │      │      │              │   rank 1    │
//!        └──────┴──────┘              └─────────────┘
//! ```
//!
//! With [`Sequence::Kept`] or [`Sequence::Regathered`], what lies between the pairs (norms,
//! residuals) is divided over the ranks too. Adding up then leaves each rank its part, and the next
//! pair gathers the parts: the same bytes, less memory. A part is an interval of the tokens of the
//! batch, one sequence after the other, so that putting parts together moves nothing.
//!
//! A model is written once: on one rank every function here is the plain layer.

mod columns;
mod gather;
mod vocabulary;

use std::fmt;
use std::ops::Range;

use tch::Tensor;
use trainyard_mesh::chunk;
use trainyard_torch::Group;

use crate::layers::Linear;
use crate::{NnError, Result, cross_entropy_sum};

/// What a rank has of the positions between two pairs of matrices.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum Sequence {
    /// All of them.
    #[default]
    Whole,
    /// A part. What was gathered for a pair's first matrix is kept for its backward.
    Kept,
    /// A part. Backward gathers again, so that everything a block keeps is divided by the number of
    /// ranks; half as many bytes more.
    Regathered,
}

/// The ranks that share every matrix, or this rank alone. Cloning shares them.
#[derive(Clone, Default)]
pub struct TensorParallel(Option<Ranks>);

#[derive(Clone)]
struct Ranks {
    group: Group,
    sequence: Sequence,
    overlap: bool,
}

impl TensorParallel {
    /// Matrices are whole.
    pub fn alone() -> TensorParallel {
        TensorParallel(None)
    }

    /// Matrices are shared by the ranks of `group`.
    pub fn new(group: &Group, sequence: Sequence) -> TensorParallel {
        TensorParallel((group.size() > 1).then(|| Ranks {
            group: group.clone(),
            sequence,
            overlap: true,
        }))
    }

    /// Whether communication runs beside the products that do not need it.
    #[must_use]
    pub fn overlap(mut self, overlap: bool) -> TensorParallel {
        if let Some(ranks) = &mut self.0 {
            ranks.overlap = overlap;
        }
        self
    }

    /// How many ranks share a matrix.
    pub fn size(&self) -> usize {
        self.0.as_ref().map_or(1, |ranks| ranks.group.size())
    }

    /// Which of them this is.
    pub fn index(&self) -> usize {
        self.0.as_ref().map_or(0, |ranks| ranks.group.index())
    }

    /// What this rank has of the positions between pairs.
    pub fn sequence(&self) -> Sequence {
        self.0.as_ref().map_or(Sequence::Whole, |r| r.sequence)
    }

    /// The ranks, where there are several.
    pub(crate) fn group(&self) -> Option<&Group> {
        self.0.as_ref().map(|ranks| &ranks.group)
    }

    /// The ranks whose parts of the positions make the whole, where there are several.
    pub(crate) fn sequence_group(&self) -> Option<&Group> {
        self.group().filter(|_| self.sequence() != Sequence::Whole)
    }

    /// This rank's interval of `length` things, which the ranks must be able to share evenly.
    pub(crate) fn share(&self, what: &str, length: usize) -> Result<Range<usize>> {
        if !length.is_multiple_of(self.size()) {
            return Err(NnError::Uneven {
                what: what.to_owned(),
                length,
                num_ranks: self.size(),
            });
        }
        let each = length / self.size();
        Ok(self.index() * each..(self.index() + 1) * each)
    }

    /// The products of one input with several matrices that are cut by their outputs.
    ///
    /// `x` is what lies between pairs; the products have all positions and this rank's features.
    pub fn columns<const N: usize>(&self, x: &Tensor, maps: [&Linear; N]) -> Result<[Tensor; N]> {
        let products = match &self.0 {
            None => maps
                .iter()
                .map(|map| map.forward(x))
                .collect::<Result<_>>()?,
            Some(ranks) => {
                let weights = maps.iter().map(|map| map.value());
                let products = columns::columns(ranks, x, &weights.collect::<Result<Vec<_>>>()?)?;
                let biased = products.into_iter().zip(&maps).map(|(product, map)| {
                    Ok(match map.bias()? {
                        Some(bias) => product.f_add(&bias)?,
                        None => product,
                    })
                });
                biased.collect::<Result<Vec<_>>>()?
            }
        };
        products.try_into().map_err(|products: Vec<Tensor>| {
            let made = products.len();
            trainyard_torch::TorchError::Invalid(format!("{made} products of {N} matrices")).into()
        })
    }

    /// The product of this rank's features with a matrix that is cut by its inputs, added up; a bias
    /// is added to the sum, once.
    pub fn rows(&self, x: &Tensor, map: &Linear) -> Result<Tensor> {
        if self.0.is_none() {
            return map.forward(x);
        }
        let sum = self.add_up(&map.product(x)?)?;
        Ok(match map.bias()? {
            Some(bias) => sum.f_add(&bias)?,
            None => sum,
        })
    }

    /// The sum of every rank's `term`, or this rank's part of the sum. The term's memory may become
    /// the sum's.
    pub(crate) fn add_up(&self, term: &Tensor) -> Result<Tensor> {
        match &self.0 {
            None => Ok(term.shallow_clone()),
            Some(ranks) if ranks.sequence == Sequence::Whole => gather::reduced(&ranks.group, term),
            Some(ranks) => gather::scattered(&ranks.group, term),
        }
    }

    /// Cross entropy of `logits`, of which each rank has an interval of `num_classes`, summed. Nobody
    /// ever has all logits.
    pub fn cross_entropy_sum(
        &self,
        logits: &Tensor,
        targets: &Tensor,
        num_classes: usize,
    ) -> Result<Tensor> {
        match self.group() {
            None => cross_entropy_sum(logits, targets),
            Some(group) => {
                let own = self.interval(num_classes);
                vocabulary::cross_entropy_sum(group, logits, targets, &own)
            }
        }
    }

    /// The rows for `tokens` of a table of `num_rows`, of which `table` is this rank's interval.
    pub(crate) fn look_up(
        &self,
        table: &Tensor,
        tokens: &Tensor,
        num_rows: usize,
    ) -> Result<Tensor> {
        match self.group() {
            None => vocabulary::rows(table, tokens),
            Some(_) => vocabulary::own_rows(table, tokens, &self.interval(num_rows)),
        }
    }

    /// This rank's interval of the words of a vocabulary; the last rank's may be shorter.
    pub(crate) fn interval(&self, num_words: usize) -> Range<usize> {
        chunk(num_words, self.size(), self.index())
    }
}

impl fmt::Debug for TensorParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (index, size) = (self.index(), self.size());
        write!(
            f,
            "TensorParallel({index} of {size}, {:?})",
            self.sequence()
        )
    }
}
