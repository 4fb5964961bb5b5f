//! Document masking: several documents in one sequence that do not attend to each other.
//!
//! Training packs short documents into full sequences. With a causal mask alone, a document would attend to unrelated
//! documents before it. Here attention is computed document by document, which also computes less than a mask would.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};
use trainyard_torch::kernel;

use crate::Result;

/// The document boundaries of a batch. Clones share them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Documents {
    /// The length of each document, one sequence after the other; no document crosses a sequence boundary.
    lengths: Arc<[i64]>,
    num_sequences: i64,
}

impl Documents {
    /// The documents of `tokens` [batch, positions]; each ends with the token `end` or with its sequence.
    pub fn from_tokens(tokens: &Tensor, end: i64) -> Result<Documents> {
        let (num_sequences, length) = tokens.size2()?;
        let tokens = tokens
            .f_to_device(Device::Cpu)?
            .f_to_kind(Kind::Int64)?
            .f_contiguous()?;
        let tokens = Vec::<i64>::try_from(&tokens.f_reshape(-1i64)?)?;
        let sequences = tokens.chunks(length.max(1) as usize);
        let lengths = sequences.flat_map(|tokens| lengths(tokens, end));
        Ok(Documents {
            lengths: lengths.collect(),
            num_sequences,
        })
    }

    /// Causal attention within every document, on [batch, positions, heads, head_dim].
    pub(crate) fn attention(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let split = |heads: &Tensor| -> Result<Vec<Tensor>> {
            Ok(heads
                .f_flatten(0, 1)?
                .f_split_with_sizes(&*self.lengths, 0)?)
        };
        // [1, heads, positions, head_dim]
        let transposed = |document: &Tensor| document.f_transpose(0, 1)?.f_unsqueeze(0);
        let (qs, ks, vs) = (split(q)?, split(k)?, split(v)?);
        let mut outputs = Vec::with_capacity(self.lengths.len());
        for ((q, k), v) in qs.iter().zip(&ks).zip(&vs) {
            let output =
                kernel::attention(&transposed(q)?, &transposed(k)?, &transposed(v)?, true)?;
            outputs.push(output.f_squeeze_dim(0)?.f_transpose(0, 1)?);
        }
        Ok(Tensor::f_cat(&outputs, 0)?.f_view(&q.size()[..])?)
    }

    /// Whether every sequence is one document, so that no masking is needed.
    pub(crate) fn is_trivial(&self) -> bool {
        self.lengths.len() as i64 == self.num_sequences
    }
}

/// The length of each document of a sequence.
fn lengths(tokens: &[i64], end: i64) -> Vec<i64> {
    let documents = tokens.split_inclusive(|&token| token == end);
    documents.map(|document| document.len() as i64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_document_ends_with_its_last_token_or_its_sequence() -> Result<()> {
        let tokens = Tensor::from_slice(&[1i64, 0, 2, 3, 4, 5, 0, 0]).view([2, 4]);
        let documents = Documents::from_tokens(&tokens, 0)?;
        assert_eq!(&*documents.lengths, [2, 2, 3, 1]);
        assert!(!documents.is_trivial());
        assert!(Documents::from_tokens(&tokens, 9)?.is_trivial());
        Ok(())
    }

    /// The reference: attention with an explicit mask over full sequences.
    fn masked(tokens: &Tensor, end: i64, heads: &[Tensor; 3]) -> Tensor {
        let (_, length) = tokens.size2().unwrap();
        let ends = tokens.eq(end).to_kind(Kind::Int64);
        let number = ends.cumsum(1, Kind::Int64) - &ends;
        let is_same = number.unsqueeze(2).eq_tensor(&number.unsqueeze(1));
        let ones = Tensor::ones([length, length], (Kind::Bool, Device::Cpu));
        let mask = is_same.logical_and(&ones.tril(0)).unsqueeze(1);
        let [q, k, v] = heads.each_ref().map(|t| t.transpose(1, 2));
        let scores = q.matmul(&k.transpose(-2, -1)) / (q.size()[3] as f64).sqrt();
        let scores = scores.masked_fill(&mask.logical_not(), f64::NEG_INFINITY);
        scores.softmax(-1, Kind::Double).matmul(&v).transpose(1, 2)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn attention_equals_masked_attention(tokens in prop::collection::vec(0i64..4, 24)) {
            let tokens = Tensor::from_slice(&tokens).view([2, 12]);
            let random = || Tensor::randn([2, 12, 3, 8], (Kind::Double, Device::Cpu)).set_requires_grad(true);
            let heads = [random(), random(), random()];
            let documents = Documents::from_tokens(&tokens, 0).unwrap();
            let ours = documents.attention(&heads[0], &heads[1], &heads[2]).unwrap();
            let theirs = masked(&tokens, 0, &heads);
            prop_assert!(ours.allclose(&theirs, 1e-10, 1e-12, false));
            let direction = Tensor::randn_like(&ours);
            let gradients = |y: Tensor| {
                let loss = (y * &direction).sum(Kind::Double);
                Tensor::run_backward(&[loss], &heads, false, false)
            };
            for (ours, theirs) in gradients(ours).iter().zip(&gradients(theirs)) {
                prop_assert!(ours.allclose(theirs, 1e-9, 1e-11, false));
            }
        }
    }
}
