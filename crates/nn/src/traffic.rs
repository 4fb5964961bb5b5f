//! What a decoder's layers send in a step, by formula.
//!
//! Written from the definition of the strategies, not from their code: `verify` and the tests compare
//! it with what the ledger counted. With batch `b`, sequence `s`, width `h`, `t` ranks that share
//! matrices, `c` that share sequences, and elements of `w` bytes, all ranks that share one batch send:
//!
//! - for each of the `2·pairs + 2` sums of positions (after each pair of matrices in forward, before
//!   it in backward; the embedding's and the head's are one each): `2·(t − 1)·b·s·h·w`, whether as
//!   all-reduces or as reduce-scatters and all-gathers; a dense block has two pairs;
//! - where backward gathers again, `(t − 1)·b·s·h·w` for each of `pairs + 1` gathers;
//! - for the loss, three numbers per position from each rank to each other: `3·t·(t − 1)·b·s·w_loss`;
//! - in a ring, per layer, keys and values once round in forward and once in backward, and their
//!   gradients once: `6·(c − 1)·b·s·k·w`, where `k` is the width of all ranks' keys together;
//! - with Ulysses, per layer, queries, keys, values and the result in forward and in backward:
//!   `2·(c − 1)/c·b·s·(2·q + 2·k)·w`.

use crate::layers::AttentionSizes;
use crate::{Builder, Method, Sequence};

/// What the formulas need to know of a model.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    num_layers: u64,
    num_pairs: u64,
    width: u64,
    q_width: u64,
    /// Of all ranks that share a matrix; heads that several compute count for each.
    kv_width: u64,
    tp: u64,
    cp: u64,
    sequence: Sequence,
    method: Option<Method>,
    /// Bytes of an element, and of one in the loss.
    widths: (u64, u64),
}

impl Traffic {
    pub(crate) fn new(
        num_layers: usize,
        num_pairs: usize,
        sizes: &AttentionSizes,
        builder: &Builder,
    ) -> Traffic {
        let (tp, cp) = (builder.tensor_parallel(), builder.context_parallel());
        let kind = builder.computes_in();
        // Where ranks are more than heads of keys, each computes one; Ulysses repeats heads too.
        let at_least = |heads: usize, ranks: usize| heads.max(ranks);
        let mut kv_heads = at_least(sizes.num_kv_heads, tp.size());
        if cp.method() == Some(Method::Ulysses) {
            kv_heads = at_least(kv_heads / tp.size(), cp.size()) * tp.size();
        }
        let bytes = |kind: tch::Kind| kind.elt_size_in_bytes() as u64;
        Traffic {
            num_layers: num_layers as u64,
            num_pairs: num_pairs as u64,
            width: sizes.width as u64,
            q_width: (sizes.num_heads * sizes.head_dim) as u64,
            kv_width: (kv_heads * sizes.head_dim) as u64,
            tp: tp.size() as u64,
            cp: cp.size() as u64,
            sequence: tp.sequence(),
            method: cp.method(),
            widths: (bytes(kind), bytes(crate::loss::wide(kind))),
        }
    }

    /// Bytes sent by all ranks that share a batch of `num_tokens`, in one forward and backward.
    pub(crate) fn sent(&self, num_tokens: u64) -> u64 {
        self.sums(num_tokens) + self.loss(num_tokens) + self.attention(num_tokens)
    }

    fn sums(&self, num_tokens: u64) -> u64 {
        let once = (self.tp - 1) * num_tokens * self.width * self.widths.0;
        let gathers = match self.sequence {
            Sequence::Regathered => self.num_pairs + 1,
            Sequence::Whole | Sequence::Kept => 0,
        };
        ((2 * self.num_pairs + 2) * 2 + gathers) * once
    }

    fn loss(&self, num_tokens: u64) -> u64 {
        3 * self.tp * (self.tp - 1) * num_tokens * self.widths.1
    }

    fn attention(&self, num_tokens: u64) -> u64 {
        let per_layer = match self.method {
            None => 0,
            Some(Method::Ring) => 6 * (self.cp - 1) * num_tokens * self.kv_width,
            Some(Method::Ulysses) => {
                let exchanged = num_tokens * (2 * self.q_width + 2 * self.kv_width);
                2 * exchanged / self.cp * (self.cp - 1)
            }
        };
        self.num_layers * per_layer * self.widths.0
    }
}
