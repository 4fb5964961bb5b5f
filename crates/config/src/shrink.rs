//! Scales a config down, to verify on one node what will run on thousands.
//!
//! Dimensions shrink, structure stays: query heads per KV head, MLP width per hidden size, a tied head, types, degrees,
//! accumulation. Nothing is read from or written to disk.

use trainyard_arch::{DecoderConfig, LatentAttention, MoeConfig, SlidingWindow};

use crate::{
    Backend, CheckpointSection, Config, ContextMethod, Dataset, ModelSection, ModelSpec,
    MoeSection, ProfilingSection, ValidationSection,
};

/// The maximum number of micro-batches; divisible by 1, 2, 3, 4 and 6 data-parallel ranks.
const MICROBATCHES: usize = 12;
/// A head dimension whose half and double are even too, as rotary embedding requires.
const HEAD_DIM: usize = 8;
/// The sequence length, unless context parallelism needs more.
const SEQ_LEN: usize = 64;
/// The width of a sliding window, less than a sequence.
const WINDOW: usize = 16;
const LONGEST: usize = 4096;
/// The maximum tensor-parallel degree.
const MOST_RANKS: usize = 64;

impl Config {
    /// A copy of this config that runs in seconds on a few CPU ranks.
    pub fn shrink(&self) -> Config {
        let mut small = self.clone();
        // Divisible by the context-parallel degree.
        let (tp, cp) = (self.num_tensor_ranks(), self.num_context_ranks());
        let num_sharers = tp.saturating_mul(cp);
        let shortest = num_sharers.saturating_mul(2);
        let training = &mut small.training;
        let microbatches = training
            .global_batch_size
            .map(|global| global.div_ceil(training.local_batch_size.max(1)));
        training.local_batch_size = training.local_batch_size.min(2);
        training.global_batch_size =
            microbatches.map(|number| training.local_batch_size * number.min(MICROBATCHES));
        if shortest <= LONGEST {
            // Long enough that payloads dominate packet headers.
            let short = SEQ_LEN.max(32 * num_sharers).next_multiple_of(shortest);
            training.seq_len = training.seq_len.min(short);
        }
        training.steps = training.steps.min(5);
        if training.dataset.custom().is_none() {
            training.dataset = Dataset::Synthetic.into();
            training.dataset_path = None;
        }

        let steps = small.training.steps;
        small.lr_scheduler.warmup_steps = match small.lr_scheduler.decay_ratio {
            // Rounding could make a shortened warm-up overlap with the decay.
            Some(_) => 0,
            None => small.lr_scheduler.warmup_steps.min(steps),
        };
        small.model = ModelSection {
            attn_mask_type: self.model.attn_mask_type,
            ..self.shrunk_model()
        };
        // A token that small vocabularies contain.
        small.training.eos_token_id = self.training.eos_token_id.map(|end| end % 64);
        small.checkpoint = CheckpointSection::default();
        small.profiling = ProfilingSection::default();
        small.validation = ValidationSection::default();
        small.comm.backend = Backend::Gloo;
        small
    }

    /// The same model with small dimensions. One that cannot be resolved stays as it is, and [`Config::check`] rejects it.
    fn shrunk_model(&self) -> ModelSection {
        let unchanged = ModelSection {
            initial_weights: None,
            ..self.model.clone()
        };
        match self.model.resolve() {
            Ok(ModelSpec::Decoder(decoder)) if decoder.is_gpt2() => ModelSection {
                // Such a model has no key for them: it has as many as query heads.
                num_key_value_heads: None,
                head_dim: None,
                ..unchanged.resized(&self.shrunk_gpt2(&decoder))
            },
            Ok(ModelSpec::Decoder(decoder)) => unchanged.resized(&self.shrunk_decoder(&decoder)),
            Ok(ModelSpec::Cnn | ModelSpec::Vit(_) | ModelSpec::Custom(_)) | Err(_) => unchanged,
        }
    }

    /// Enough heads for the tensor-parallel ranks, and little else.
    fn shrunk_gpt2(&self, decoder: &DecoderConfig) -> DecoderConfig {
        let tp = self.num_tensor_ranks().clamp(1, MOST_RANKS);
        let sharers = match self.parallelism.context_parallel_method {
            ContextMethod::Ulysses => tp * self.num_context_ranks().clamp(1, MOST_RANKS),
            ContextMethod::Ring => tp,
        };
        let num_attention_heads = 2usize.next_multiple_of(sharers);
        let hidden_size = num_attention_heads * HEAD_DIM;
        DecoderConfig {
            // An indivisible vocabulary stays indivisible.
            vocab_size: decoder.vocab_size.min(509),
            hidden_size,
            intermediate_size: 4 * hidden_size,
            num_hidden_layers: decoder.num_hidden_layers.min(4),
            num_attention_heads,
            ..decoder.clone()
        }
    }

    /// Enough blocks for every pipeline stage, and at least four.
    fn fewest_layers(&self) -> usize {
        let section = &self.parallelism;
        let ranks = usize::try_from(section.pipeline_parallel_degree).unwrap_or(1);
        let kind = section.schedule_kind().ok();
        let chunks = kind.and_then(|kind| kind.num_chunks());
        let chunks = chunks.unwrap_or(section.pipeline_parallel_stages_per_rank);
        // The embedding and the head are units too.
        ranks.saturating_mul(chunks).saturating_sub(2).max(4)
    }

    /// As few experts as the expert-parallel degree allows, each narrow; and few enough dense blocks that one block has
    /// experts.
    fn shrunk_experts(&self, moe: &MoeConfig) -> MoeConfig {
        let ranks = usize::try_from(self.parallelism.expert_parallel_degree).unwrap_or(1);
        // Groups of two experts each.
        let groups = moe.groups.map_or(1, |groups| 2 * groups.n_group);
        let unit = least_common_multiple(ranks.max(1), groups);
        let few = moe.num_experts_per_tok.max(8).next_multiple_of(unit);
        let tp = self.num_tensor_ranks().clamp(1, MOST_RANKS);
        MoeConfig {
            num_experts: moe.num_experts.min(few),
            moe_intermediate_size: HEAD_DIM / 2 * tp,
            first_k_dense_replace: moe.first_k_dense_replace.min(1),
            ..moe.clone()
        }
    }

    /// As few KV heads as the tensor-parallel degree allows; unchanged dimensions if that is many.
    fn shrunk_decoder(&self, shape: &DecoderConfig) -> DecoderConfig {
        let tp = self.num_tensor_ranks();
        let few = shape.num_key_value_heads.min(2)..=shape.num_key_value_heads.min(MOST_RANKS);
        let fits = |small: &DecoderConfig| {
            let model = ModelSpec::Decoder(small.clone().into());
            tp <= MOST_RANKS && self.check_sharing(&model).is_ok()
        };
        let moe = shape.moe.as_ref().map(|moe| self.shrunk_experts(moe));
        let num_hidden_layers = shape.num_hidden_layers.min(self.fewest_layers());
        few.map(|kv_heads| DecoderConfig {
            moe: moe.clone(),
            num_hidden_layers,
            ..shrink_decoder(shape, kv_heads, tp.min(MOST_RANKS))
        })
        .find(fits)
        .unwrap_or_else(|| shape.clone())
    }
}

fn shrink_decoder(shape: &DecoderConfig, num_key_value_heads: usize, tp: usize) -> DecoderConfig {
    let queries_per_key = shape.num_attention_heads / shape.num_key_value_heads;
    let num_attention_heads = num_key_value_heads * queries_per_key.min(16);
    let hidden_size = num_attention_heads * HEAD_DIM;
    // The ratio of the total head width to the hidden size stays.
    let head_dim = match shape.query_width().cmp(&shape.hidden_size) {
        std::cmp::Ordering::Less => HEAD_DIM / 2,
        std::cmp::Ordering::Equal => HEAD_DIM,
        std::cmp::Ordering::Greater => HEAD_DIM * 2,
    };
    let mlp = hidden_size * shape.intermediate_size / shape.hidden_size;
    DecoderConfig {
        vocab_size: shape.vocab_size.min(512usize.next_multiple_of(tp)),
        hidden_size,
        intermediate_size: mlp.clamp(8, 4 * hidden_size).next_multiple_of(8 * tp),
        num_hidden_layers: shape.num_hidden_layers.min(4),
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        sliding_window: shape.sliding_window.map(|window| SlidingWindow {
            sliding_window: window.sliding_window.min(WINDOW),
            ..window
        }),
        latent: shape.latent.as_ref().map(|latent| LatentAttention {
            q_lora_rank: latent.q_lora_rank.map(|_| 3 * HEAD_DIM),
            kv_lora_rank: 2 * HEAD_DIM,
            qk_nope_head_dim: HEAD_DIM,
            qk_rope_head_dim: HEAD_DIM / 2,
            v_head_dim: HEAD_DIM,
        }),
        ..shape.clone()
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let mut multiples = (1..=b).map(|times| times * a);
    let found = multiples.find(|multiple| multiple.is_multiple_of(b));
    found.unwrap_or(a)
}

impl ModelSection {
    /// The same model with other dimensions.
    fn resized(self, decoder: &DecoderConfig) -> ModelSection {
        let moe = |experts: &MoeConfig| MoeSection {
            num_experts: Some(experts.num_experts),
            moe_intermediate_size: Some(experts.moe_intermediate_size),
            first_k_dense_replace: Some(experts.first_k_dense_replace),
            ..self.moe.clone().unwrap_or_default()
        };
        let latent = decoder.latent.as_ref();
        let window = decoder.sliding_window.as_ref();
        ModelSection {
            moe: decoder.moe.as_ref().map(moe),
            sliding_window: window.map(|window| window.sliding_window),
            q_lora_rank: latent.and_then(|latent| latent.q_lora_rank),
            kv_lora_rank: latent.map(|latent| latent.kv_lora_rank),
            qk_nope_head_dim: latent.map(|latent| latent.qk_nope_head_dim),
            qk_rope_head_dim: latent.map(|latent| latent.qk_rope_head_dim),
            v_head_dim: latent.map(|latent| latent.v_head_dim),
            vocab_size: Some(decoder.vocab_size),
            hidden_size: Some(decoder.hidden_size),
            intermediate_size: Some(decoder.intermediate_size),
            num_hidden_layers: Some(decoder.num_hidden_layers),
            num_attention_heads: Some(decoder.num_attention_heads),
            num_key_value_heads: Some(decoder.num_key_value_heads),
            head_dim: Some(decoder.head_dim),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decoder(config: &Config) -> DecoderConfig {
        let spec = config.model.resolve().unwrap();
        spec.decoder().unwrap().clone()
    }

    #[test]
    fn a_70b_model_keeps_its_structure() {
        let text = "[model]\nflavor = \"llama3-70b\"\n[training]\nlocal_batch_size = 1\n\
                    global_batch_size = 1024\nseq_len = 8192\n[lr_scheduler]\nwarmup_steps = 2000";
        let big = Config::parse(text, &[]).unwrap();
        let small = big.shrink();
        small.check().unwrap();
        let (before, after) = (decoder(&big), decoder(&small));
        assert!(
            after.num_parameters() < 4_000_000,
            "{}",
            after.num_parameters()
        );
        assert_eq!(after.num_attention_heads / after.num_key_value_heads, 8);
        assert_eq!(after.query_width(), after.hidden_size);
        assert_eq!(
            after.intermediate_size * before.hidden_size,
            before.intermediate_size * after.hidden_size
        );
        assert_eq!(after.rope_theta, before.rope_theta);
        assert_eq!(small.training.global_batch_size, Some(12));
        for ranks in [1, 2, 3, 4] {
            small.batching(ranks).unwrap();
        }
    }

    proptest! {
        #[test]
        fn a_shrunk_config_is_valid_and_small(
            kv_heads in 1usize..20,
            queries in 1usize..40,
            hidden in 1usize..9000,
            mlp in 1usize..90_000,
            half_head in 1usize..200,
            layers in 1usize..200,
            local in 1usize..9,
            times in prop::option::of(1usize..5000),
            steps in 1u64..9000,
            decay in prop::option::of(0.0..1.0),
        ) {
            let mut big = Config::default();
            big.model.num_key_value_heads = Some(kv_heads);
            big.model.num_attention_heads = Some(kv_heads * queries);
            big.model.hidden_size = Some(hidden);
            big.model.intermediate_size = Some(mlp);
            big.model.head_dim = Some(2 * half_head);
            big.model.num_hidden_layers = Some(layers);
            big.training.local_batch_size = local;
            big.training.global_batch_size = times.map(|times| times * local);
            big.training.steps = steps;
            big.lr_scheduler.decay_ratio = decay;
            big.check().unwrap();
            let small = big.shrink();
            small.check().unwrap();
            prop_assert!(decoder(&small).num_parameters() < 10_000_000);
        }
    }
}
