//! Tensor parallelism: the ranks of a group shard every weight matrix of a model, as in Megatron-LM.
//!
//! Matrices come in pairs without communication between the two. The first is colwise-parallel, sharded by its
//! outputs ([`TensorParallel::colwise`]): every rank computes some features of all positions. The second is
//! rowwise-parallel, sharded by its inputs ([`TensorParallel::rowwise`]): every rank computes a partial sum, and an
//! all-reduce adds them up. Forward reduces after the second matrix and backward before the first, which makes four
//! all-reduces per block and step.
//!
//! ```text
//!             colwise                      rowwise
//!        ┌──────┬──────┐              ┌─────────────┐
//!   x ─▶ │ rank │ rank │ ─▶ features ▶ │   rank 0    │ ─▶ partial sums ─▶ sum
//!        │  0   │  1   │              ├─────────────┤
//!        │      │      │              │   rank 1    │
//!        └──────┴──────┘              └─────────────┘
//! ```
//!
//! With [`SequenceParallel::SaveGathered`] or [`SequenceParallel::Regather`], the activations between the pairs
//! (norms, residuals) are sharded too: a reduce-scatter leaves each rank its shard, and the next pair all-gathers the
//! shards. That sends the same bytes and needs less memory. A shard is a range of the tokens of the batch, one
//! sequence after the other, so that gathering needs no copy.
//!
//! A model is written once: without tensor parallelism every function here is the plain layer.

mod chunked_loss;
pub(crate) mod collectives;
mod colwise;
mod vocabulary;

use std::fmt;
use std::ops::Range;

use tch::Tensor;
use trainyard_mesh::chunk;
use trainyard_torch::Group;

use self::vocabulary::OwnTargets;
use crate::layers::Linear;
use crate::{NnError, Result, cross_entropy_sum};

/// Sequence parallelism: how tensor-parallel ranks shard the activations between two pairs of matrices.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum SequenceParallel {
    /// Every rank has the activations of all positions.
    #[default]
    Disabled,
    /// Each rank has a shard of the positions. The input gathered for a pair's first matrix is saved for backward.
    SaveGathered,
    /// Each rank has a shard of the positions. Backward gathers the input again, so that all saved activations are
    /// sharded, at the cost of a quarter more bytes per step.
    Regather,
}

/// The tensor-parallel group, or none. Clones share it.
#[derive(Clone, Default)]
pub struct TensorParallel(Option<Ranks>);

#[derive(Clone)]
struct Ranks {
    group: Group,
    sequence: SequenceParallel,
    overlap: bool,
}

impl Ranks {
    /// Whether each rank has a shard of the positions between pairs.
    fn shards_positions(&self) -> bool {
        self.sequence != SequenceParallel::Disabled
    }

    /// The group for collectives during which this rank computes, if it does.
    fn overlapped_group(&self) -> Group {
        if self.overlap {
            self.group.clone()
        } else {
            self.group.on_caller()
        }
    }
}

impl TensorParallel {
    /// No tensor parallelism: every rank has full matrices.
    pub fn disabled() -> TensorParallel {
        TensorParallel(None)
    }

    /// Shards matrices over the ranks of `group`.
    pub fn new(group: &Group, sequence: SequenceParallel) -> TensorParallel {
        TensorParallel((group.size() > 1).then(|| Ranks {
            group: group.clone(),
            sequence,
            overlap: true,
        }))
    }

    /// Whether communication overlaps with matrix products that do not depend on it.
    #[must_use]
    pub fn overlap(mut self, overlap: bool) -> TensorParallel {
        if let Some(ranks) = &mut self.0 {
            ranks.overlap = overlap;
        }
        self
    }

    /// The same ranks, each with the activations of all positions.
    #[must_use]
    pub fn without_sequence_parallel(mut self) -> TensorParallel {
        if let Some(ranks) = &mut self.0 {
            ranks.sequence = SequenceParallel::Disabled;
        }
        self
    }

    /// The number of tensor-parallel ranks.
    pub fn size(&self) -> usize {
        self.0.as_ref().map_or(1, |ranks| ranks.group.size())
    }

    /// This rank's index in the group.
    pub fn index(&self) -> usize {
        self.0.as_ref().map_or(0, |ranks| ranks.group.index())
    }

    /// The mode of sequence parallelism.
    pub fn sequence_parallel(&self) -> SequenceParallel {
        self.0
            .as_ref()
            .map_or(SequenceParallel::Disabled, |r| r.sequence)
    }

    /// The group, if there are several ranks.
    pub(crate) fn group(&self) -> Option<&Group> {
        self.0.as_ref().map(|ranks| &ranks.group)
    }

    /// The group over which activations between pairs are sharded, if sequence parallelism is on.
    pub(crate) fn sequence_group(&self) -> Option<&Group> {
        self.group()
            .filter(|_| self.sequence_parallel() != SequenceParallel::Disabled)
    }

    /// This rank's range of `length` items, which must be divisible by the number of ranks.
    pub(crate) fn shard_range(&self, what: &str, length: usize) -> Result<Range<usize>> {
        if !length.is_multiple_of(self.size()) {
            return Err(NnError::NotDivisible {
                what: what.to_owned(),
                length,
                num_ranks: self.size(),
            });
        }
        let each = length / self.size();
        Ok(self.index() * each..(self.index() + 1) * each)
    }

    /// Multiplies one input with several colwise-parallel matrices.
    ///
    /// `x` is the activation between pairs; the products have all positions and this rank's features.
    pub fn colwise<const N: usize>(&self, x: &Tensor, layers: [&Linear; N]) -> Result<[Tensor; N]> {
        let products: Vec<Tensor> = match &self.0 {
            // One rank adds biases within the products.
            None if layers.iter().any(|layer| layer.has_bias()) => {
                let outputs = layers.iter().map(|layer| layer.forward(x));
                outputs.collect::<Result<_>>()?
            }
            ranks => {
                let weights = layers.iter().map(|layer| layer.value());
                let weights = weights.collect::<Result<Vec<_>>>()?;
                let products = colwise::colwise(ranks.as_ref(), x, &weights)?;
                let biased = products.into_iter().zip(&layers).map(|(product, layer)| {
                    Ok(match layer.bias()? {
                        Some(bias) => product.f_add(&bias)?,
                        None => product,
                    })
                });
                biased.collect::<Result<_>>()?
            }
        };
        products.try_into().map_err(|products: Vec<Tensor>| {
            let num_products = products.len();
            trainyard_torch::TorchError::Invalid(format!(
                "{num_products} products for {N} matrices"
            ))
            .into()
        })
    }

    /// Multiplies this rank's features with a rowwise-parallel matrix and reduces the partial sums. The bias is added
    /// once, to the sum.
    pub fn rowwise(&self, x: &Tensor, layer: &Linear) -> Result<Tensor> {
        if self.0.is_none() {
            return layer.forward(x);
        }
        let sum = self.reduce_output(&layer.product(x)?)?;
        Ok(match layer.bias()? {
            Some(bias) => sum.f_add(&bias)?,
            None => sum,
        })
    }

    /// The sum of every rank's `part`, which all ranks use: backward sums the gradients too.
    pub(crate) fn sum(&self, part: &Tensor) -> Result<Tensor> {
        match &self.0 {
            None => Ok(part.shallow_clone()),
            Some(ranks) => {
                let part = collectives::all_reduce_gradient(&ranks.group, part)?;
                collectives::all_reduce(&ranks.group, &part)
            }
        }
    }

    /// The activation between pairs `x` with all positions, as the input of matrices of which this rank has some outputs.
    /// Where there is only one such matrix, or several with the same input, [`colwise`](Self::colwise) is faster.
    pub(crate) fn gather_input(&self, x: &Tensor) -> Result<Tensor> {
        match &self.0 {
            None => Ok(x.shallow_clone()),
            Some(ranks) if ranks.sequence == SequenceParallel::Disabled => {
                collectives::all_reduce_gradient(&ranks.group, x)
            }
            Some(ranks) => collectives::all_gather(&ranks.group, x),
        }
    }

    /// Reduces every rank's partial sum `partial`: an all-reduce, or a reduce-scatter with sequence parallelism. May
    /// reuse the memory of `partial`.
    pub(crate) fn reduce_output(&self, partial: &Tensor) -> Result<Tensor> {
        match &self.0 {
            None => Ok(partial.shallow_clone()),
            Some(ranks) if ranks.sequence == SequenceParallel::Disabled => {
                collectives::all_reduce(&ranks.group, partial)
            }
            Some(ranks) => collectives::reduce_scatter(&ranks.group, partial),
        }
    }

    /// The summed cross entropy of vocabulary-parallel `logits` over `num_classes`. No rank ever has all logits.
    pub fn cross_entropy_sum(
        &self,
        logits: &Tensor,
        targets: &Tensor,
        num_classes: usize,
    ) -> Result<Tensor> {
        match self.group() {
            None => cross_entropy_sum(logits, targets),
            Some(group) => {
                let targets = OwnTargets::new(targets, Some(&self.vocab_range(num_classes)))?;
                vocabulary::cross_entropy_sum(group, logits, &targets)
            }
        }
    }

    /// The summed cross entropy of the activation between pairs `x`, projected to `num_classes` by `weight`, of which
    /// this rank has a range. The logits of one of `num_chunks` chunks of the tokens exist at a time.
    pub(crate) fn chunked_cross_entropy_sum(
        &self,
        x: &Tensor,
        weight: &Tensor,
        targets: &Tensor,
        num_classes: usize,
        num_chunks: usize,
    ) -> Result<Tensor> {
        let hidden = self.gather_input(x)?;
        let group = self.group();
        let own = group.map(|_| self.vocab_range(num_classes));
        let targets = OwnTargets::new(targets, own.as_ref())?;
        Ok(chunked_loss::cross_entropy_sum(
            group, &hidden, weight, &targets, num_chunks,
        )?)
    }

    /// Looks up `tokens` in a vocabulary-parallel table of `num_rows`, of which `table` is this rank's shard.
    pub(crate) fn embedding(
        &self,
        table: &Tensor,
        tokens: &Tensor,
        num_rows: usize,
    ) -> Result<Tensor> {
        match self.group() {
            None => vocabulary::rows(table, tokens),
            Some(_) => vocabulary::sharded_rows(table, tokens, &self.vocab_range(num_rows)),
        }
    }

    /// This rank's range of the vocabulary; the last rank's may be smaller.
    pub(crate) fn vocab_range(&self, num_words: usize) -> Range<usize> {
        chunk(num_words, self.size(), self.index())
    }
}

impl fmt::Debug for TensorParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (index, size) = (self.index(), self.size());
        write!(
            f,
            "TensorParallel({index} of {size}, {:?})",
            self.sequence_parallel()
        )
    }
}
