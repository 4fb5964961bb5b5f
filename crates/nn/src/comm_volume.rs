//! The communication volume of a decoder's layers in a step, from closed formulas.
//!
//! The formulas follow from the definition of the strategies, not from their code: `trainyard verify` and the tests
//! compare them with the bytes in the ledger. With micro-batch size `b`, sequence length `s`, hidden size `h`, `t`
//! tensor-parallel ranks, `c` context-parallel ranks, and elements of `w` bytes, all ranks that work on one batch
//! send:
//!
//! - for each of the `2·pairs + 2` reductions of activations (after each colwise/rowwise pair in forward, before it
//!   in backward; one each for the embedding and the head): `2·(t − 1)·b·s·h·w`, either as all-reduces or as
//!   reduce-scatters and all-gathers; a dense block has two pairs; latent attention reduces its latents, which are
//!   narrower than `h`, instead of the input of its pair;
//! - if backward gathers activations again, `(t − 1)·b·s·h·w` for each of `pairs + 1` all-gathers, but none for latents,
//!   and none for a head that computes the loss in chunks;
//! - with one norm of all heads, per layer, one number per token for queries and one for keys, in forward and in
//!   backward: `8·(t − 1)·b·s·w_loss`;
//! - for the loss, three numbers per token from each rank to each other: `3·t·(t − 1)·b·s·w_loss`;
//! - with ring attention, per layer, keys and values once around the ring in forward and once in backward, and their
//!   gradients once: `6·(c − 1)·b·s·k·w`, where `k` is the KV width summed over ranks;
//! - with Ulysses, per layer, queries, keys, values and outputs in forward and in backward: `2·(c − 1)/c·b·s·(2·q +
//!   2·k)·w`.

use trainyard_arch::QkNorm;

use crate::layers::AttentionConfig;
use crate::{Builder, ContextParallelMethod, SequenceParallel};

/// The sizes that the formulas depend on.
#[derive(Clone, Debug)]
pub(crate) struct CommVolume {
    num_layers: u64,
    num_pairs: u64,
    hidden_size: u64,
    /// The total width of the latents of a layer, if it has them.
    latent_width: Option<u64>,
    normalizes_all_heads: bool,
    q_width: u64,
    /// KV width summed over tensor-parallel ranks; a head that several ranks compute counts for each.
    kv_width: u64,
    tp: u64,
    cp: u64,
    sequence: SequenceParallel,
    has_chunked_loss: bool,
    method: Option<ContextParallelMethod>,
    /// Bytes of an element of activations, and of the loss.
    element_bytes: (u64, u64),
}

impl CommVolume {
    pub(crate) fn new(
        num_layers: usize,
        num_pairs: usize,
        config: &AttentionConfig,
        latent_width: Option<usize>,
        builder: &Builder,
    ) -> CommVolume {
        let (tp, cp) = (builder.tensor_parallel(), builder.context_parallel());
        let kind = builder.computes_in();
        // If there are more ranks than KV heads, each rank computes one; Ulysses replicates KV heads too.
        let at_least = |heads: usize, ranks: usize| heads.max(ranks);
        let mut kv_heads = at_least(config.num_kv_heads, tp.size());
        if cp.method() == Some(ContextParallelMethod::Ulysses) {
            kv_heads = at_least(kv_heads / tp.size(), cp.size()) * tp.size();
        }
        let bytes = |kind: tch::Kind| kind.elt_size_in_bytes() as u64;
        CommVolume {
            num_layers: num_layers as u64,
            num_pairs: num_pairs as u64,
            hidden_size: config.hidden_size as u64,
            latent_width: latent_width.map(|width| width as u64),
            normalizes_all_heads: matches!(config.norm, Some((QkNorm::AllHeads, ..))),
            q_width: (config.num_heads * config.head_dim) as u64,
            kv_width: (kv_heads * config.head_dim) as u64,
            tp: tp.size() as u64,
            cp: cp.size() as u64,
            sequence: tp.sequence_parallel(),
            has_chunked_loss: builder.num_loss_chunks() > 1,
            method: cp.method(),
            element_bytes: (bytes(kind), bytes(crate::loss::wide(kind))),
        }
    }

    /// Bytes sent by all ranks that work on a batch of `num_tokens`, in one forward and backward pass.
    pub(crate) fn sent(&self, num_tokens: u64) -> u64 {
        self.reductions(num_tokens)
            + self.norms(num_tokens)
            + self.loss(num_tokens)
            + self.attention(num_tokens)
    }

    fn reductions(&self, num_tokens: u64) -> u64 {
        let num_latents = self.latent_width.map_or(0, |_| self.num_layers);
        let latents = num_latents * self.latent_width.unwrap_or(0);
        let gathers = match self.sequence {
            SequenceParallel::Regather => {
                self.num_pairs - num_latents + u64::from(!self.has_chunked_loss)
            }
            SequenceParallel::Disabled | SequenceParallel::SaveGathered => 0,
        };
        let of_hidden = 2 * (2 * self.num_pairs - num_latents + 2) + gathers;
        let width = of_hidden * self.hidden_size + 2 * latents;
        (self.tp - 1) * num_tokens * width * self.element_bytes.0
    }

    fn norms(&self, num_tokens: u64) -> u64 {
        let num_layers = if self.normalizes_all_heads {
            self.num_layers
        } else {
            0
        };
        8 * num_layers * (self.tp - 1) * num_tokens * self.element_bytes.1
    }

    fn loss(&self, num_tokens: u64) -> u64 {
        3 * self.tp * (self.tp - 1) * num_tokens * self.element_bytes.1
    }

    fn attention(&self, num_tokens: u64) -> u64 {
        let per_layer = match self.method {
            None => 0,
            Some(ContextParallelMethod::Ring) => 6 * (self.cp - 1) * num_tokens * self.kv_width,
            Some(ContextParallelMethod::Ulysses) => {
                let exchanged = num_tokens * (2 * self.q_width + 2 * self.kv_width);
                2 * exchanged / self.cp * (self.cp - 1)
            }
        };
        self.num_layers * per_layer * self.element_bytes.0
    }
}
