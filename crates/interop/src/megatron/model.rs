//! Megatron-LM's flags for the model.

use super::super::FrameworkError;
use super::FRAMEWORK;
use super::flags::Flags;
use trainyard_arch::{
    Activation, BIAS_UPDATE_RATE, DecoderConfig, FeedForward, Flavor, LatentAttention, MoeConfig,
    Norm, Positions, QkNorm,
};

/// The largest accepted number of layers.
const MOST_LAYERS: usize = 1 << 12;

/// The flags that describe a shape.
pub(super) fn write(shape: &DecoderConfig) -> Vec<String> {
    let mut flags = vec![
        format!("--num-layers {}", shape.num_hidden_layers),
        format!("--hidden-size {}", shape.hidden_size),
        format!("--ffn-hidden-size {}", shape.intermediate_size),
        format!("--num-attention-heads {}", shape.num_attention_heads),
        format!("--kv-channels {}", shape.head_dim),
        format!(
            "--max-position-embeddings {}",
            shape.max_position_embeddings
        ),
        // The null tokenizer adds an end-of-document token, so it gets one token less; the padded size is exact.
        "--tokenizer-type NullTokenizer".to_owned(),
        format!("--vocab-size {}", shape.vocab_size.saturating_sub(1)),
        format!("--padded-vocab-size {}", shape.vocab_size),
        "--attention-dropout 0.0 --hidden-dropout 0.0".to_owned(),
    ];
    let mut add = |is_set: bool, flag: &str| {
        if is_set {
            flags.push(flag.to_owned());
        }
    };
    let groups = format!(
        "--group-query-attention --num-query-groups {}",
        shape.num_key_value_heads
    );
    add(
        shape.num_key_value_heads != shape.num_attention_heads,
        &groups,
    );
    add(shape.feed_forward == FeedForward::Gated, "--swiglu");
    add(
        shape.norm == Norm::RootMeanSquare,
        "--normalization RMSNorm",
    );
    add(
        shape.positions == Positions::Rotary,
        "--position-embedding-type rope",
    );
    add(!shape.has_biases, "--disable-bias-linear");
    add(shape.attention_bias && !shape.has_biases, "--add-qkv-bias");
    add(shape.qk_norm.is_some(), "--qk-layernorm");
    add(
        !shape.tie_word_embeddings,
        "--untie-embeddings-and-output-weights",
    );
    if let Some(latent) = &shape.latent {
        flags.extend(write_latent(latent));
    }
    if let Some(experts) = &shape.moe {
        flags.extend(write_experts(experts, shape.num_hidden_layers));
    }
    flags
}

fn write_latent(latent: &LatentAttention) -> Vec<String> {
    let mut flags = vec![
        "--multi-latent-attention".to_owned(),
        format!("--kv-lora-rank {}", latent.kv_lora_rank),
        format!("--qk-head-dim {}", latent.qk_nope_head_dim),
        format!("--qk-pos-emb-head-dim {}", latent.qk_rope_head_dim),
        format!("--v-head-dim {}", latent.v_head_dim),
    ];
    flags.extend(
        latent
            .q_lora_rank
            .map(|rank| format!("--q-lora-rank {rank}")),
    );
    flags
}

fn write_experts(experts: &MoeConfig, num_layers: usize) -> Vec<String> {
    let mut flags = vec![
        format!("--num-experts {}", experts.num_experts),
        format!("--moe-router-topk {}", experts.num_experts_per_tok),
        format!("--moe-ffn-hidden-size {}", experts.moe_intermediate_size),
        "--moe-token-dispatcher-type alltoall".to_owned(),
        "--expert-tensor-parallel-size 1".to_owned(),
    ];
    let shared = experts.shared_width();
    if shared > 0 {
        flags.push(format!("--moe-shared-expert-intermediate-size {shared}"));
        if experts.has_shared_gate {
            flags.push("--moe-shared-expert-gate".to_owned());
        }
    }
    if experts.first_k_dense_replace > 0 {
        let (dense, rest) = (
            experts.first_k_dense_replace,
            num_layers - experts.first_k_dense_replace.min(num_layers),
        );
        flags.push(format!("--moe-layer-freq \"([0]*{dense}+[1]*{rest})\""));
    }
    if experts.bias_update_rate.is_some() {
        flags
            .push("--moe-router-enable-expert-bias --moe-router-score-function sigmoid".to_owned());
    }
    flags
}

/// Reads the shape from flags, or `None` if they do not describe the model.
pub(super) fn read(flags: &Flags) -> Result<Option<DecoderConfig>, FrameworkError> {
    if !flags.has("--num-layers") || !flags.has("--hidden-size") {
        return Ok(None);
    }
    let hidden = flags.needed("--hidden-size")?;
    let heads = flags.needed("--num-attention-heads")?;
    let layers = flags.needed("--num-layers")?;
    if heads == 0 || layers > MOST_LAYERS {
        return Err(FRAMEWORK.unsupported(
            format!("--num-attention-heads {heads} --num-layers {layers}"),
            "a value is out of range",
            format!("use at least 1 head and at most {MOST_LAYERS} layers"),
        ));
    }
    let is_gated = flags.has("--swiglu");
    // Megatron's default.
    let ffn = if is_gated {
        hidden.saturating_mul(8) / 3 / 64 * 64
    } else {
        hidden.saturating_mul(4)
    };
    let has_biases = !flags.has("--disable-bias-linear");
    let kv_heads = if flags.has("--group-query-attention") {
        flags.number("--num-query-groups")?.unwrap_or(1)
    } else {
        heads
    };
    Ok(Some(DecoderConfig {
        name: "megatron".to_owned(),
        vocab_size: read_vocabulary(flags)?,
        hidden_size: hidden,
        intermediate_size: flags.number("--ffn-hidden-size")?.unwrap_or(ffn),
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim: flags.number("--kv-channels")?.unwrap_or(hidden / heads),
        feed_forward: if is_gated {
            FeedForward::Gated
        } else {
            FeedForward::Plain
        },
        hidden_act: if is_gated {
            Activation::Silu
        } else {
            Activation::GeluTanh
        },
        norm: match flags.get("--normalization").as_deref() {
            Some("RMSNorm") => Norm::RootMeanSquare,
            _ => Norm::Layer,
        },
        positions: read_positions(flags)?,
        has_biases,
        tie_word_embeddings: !flags.has("--untie-embeddings-and-output-weights"),
        max_position_embeddings: flags.needed("--max-position-embeddings")?,
        moe: read_experts(flags, layers)?,
        attention_bias: has_biases || flags.has("--add-qkv-bias"),
        qk_norm: flags.has("--qk-layernorm").then_some(QkNorm::Head),
        latent: read_latent(flags)?,
        ..DecoderConfig::from(Flavor::Tiny)
    }))
}

fn read_vocabulary(flags: &Flags) -> Result<usize, FrameworkError> {
    if let Some(padded) = flags.number("--padded-vocab-size")? {
        return Ok(padded);
    }
    let Some(size) = flags.number("--vocab-size")? else {
        let remedy = "add --padded-vocab-size; otherwise the tokenizer determines it";
        return Err(FRAMEWORK.unspecified("the vocabulary size", remedy));
    };
    let is_null = flags
        .get("--tokenizer-type")
        .is_some_and(|name| name == "NullTokenizer");
    let unit = flags
        .number("--make-vocab-size-divisible-by")?
        .unwrap_or(128);
    let unit = unit
        .saturating_mul(flags.degree("--tensor-model-parallel-size")?)
        .max(1);
    let size = size.saturating_add(usize::from(is_null));
    Ok(size.div_ceil(unit).saturating_mul(unit))
}

fn read_positions(flags: &Flags) -> Result<Positions, FrameworkError> {
    match flags.get("--position-embedding-type").as_deref() {
        Some("rope") => Ok(Positions::Rotary),
        None if flags.has("--use-rotary-position-embeddings") => Ok(Positions::Rotary),
        None | Some("learned_absolute") => Ok(Positions::Learned),
        Some(other) => Err(FRAMEWORK.unsupported(
            format!("--position-embedding-type {other}"),
            "the planner supports rotary and learned position embeddings",
            "use rope or learned_absolute",
        )),
    }
}

fn read_latent(flags: &Flags) -> Result<Option<LatentAttention>, FrameworkError> {
    if !flags.has("--multi-latent-attention") {
        return Ok(None);
    }
    Ok(Some(LatentAttention {
        q_lora_rank: flags.number("--q-lora-rank")?,
        kv_lora_rank: flags.number("--kv-lora-rank")?.unwrap_or(32),
        qk_nope_head_dim: flags.number("--qk-head-dim")?.unwrap_or(128),
        qk_rope_head_dim: flags.number("--qk-pos-emb-head-dim")?.unwrap_or(64),
        v_head_dim: flags.number("--v-head-dim")?.unwrap_or(128),
    }))
}

fn read_experts(flags: &Flags, layers: usize) -> Result<Option<MoeConfig>, FrameworkError> {
    let Some(num_experts) = flags.number("--num-experts")?.filter(|&number| number > 0) else {
        return Ok(None);
    };
    let width = match flags.number("--moe-ffn-hidden-size")? {
        Some(width) => width,
        None => flags.needed("--ffn-hidden-size")?,
    };
    let shared = flags
        .number("--moe-shared-expert-intermediate-size")?
        .unwrap_or(0);
    let frequency = flags
        .get("--moe-layer-freq")
        .unwrap_or_else(|| "1".to_owned());
    let Some(dense) = dense_layers(&frequency, layers) else {
        return Err(FRAMEWORK.unsupported(
            format!("--moe-layer-freq {frequency}"),
            "the planner supports dense blocks at the beginning only",
            format!("use 1, or ([0]*1+[1]*{})", layers.saturating_sub(1)),
        ));
    };
    let has_bias = flags.has("--moe-router-enable-expert-bias");
    let plain = MoeConfig::plain(
        num_experts,
        flags.number("--moe-router-topk")?.unwrap_or(2),
        width,
    );
    Ok(Some(MoeConfig {
        n_shared_experts: usize::from(shared > 0),
        shared_expert_intermediate_size: Some(shared),
        first_k_dense_replace: dense,
        has_shared_gate: flags.has("--moe-shared-expert-gate"),
        bias_update_rate: has_bias.then_some(BIAS_UPDATE_RATE),
        ..plain
    }))
}

/// The number of dense blocks at the beginning, from `1` or `([0]*dense+[1]*rest)`.
fn dense_layers(frequency: &str, layers: usize) -> Option<usize> {
    if frequency == "1" {
        return Some(0);
    }
    let plain: String = frequency.chars().filter(|c| !c.is_whitespace()).collect();
    let inner = plain
        .strip_prefix('(')
        .and_then(|rest| rest.strip_suffix(')'));
    let (dense, rest) = inner.unwrap_or(&plain).split_once('+')?;
    let dense: usize = dense.strip_prefix("[0]*")?.parse().ok()?;
    let rest: usize = rest.strip_prefix("[1]*")?.parse().ok()?;
    (dense.checked_add(rest)? == layers).then_some(dense)
}
