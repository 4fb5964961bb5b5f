//! The families beside Llama and GPT-2: norms after layers, windows, one norm of all heads, latent attention.

use std::error::Error;

use trainyard_config::{Config, ContextMethod, Dtype, ModelSection};
use trainyard_conformance::{Outcome, Rank};

use super::bytes::check;
use super::equality::{
    METHODS, SEQUENCES, SequenceParallel, context_parallel, equal_one_rank, job, tensor_parallel,
};
use super::pipeline::piped;
use crate::checkpoints::shared_folder;

const SIZES: &str = r#""vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5"#;

/// A window of eight positions in three of four blocks.
const GEMMA3: &str = r#""model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8,
    "sliding_window_pattern": 4, "query_pre_attn_scalar": 24, "tie_word_embeddings": true"#;
const OLMO2: &str =
    r#""model_type": "olmo2", "num_key_value_heads": 2, "tie_word_embeddings": false"#;
const DEEPSEEK: &str = r#""model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 40, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": true,
    "tie_word_embeddings": false, "first_k_dense_replace""#;

/// A job of the model that a `config.json` with these keys describes.
fn family(rank: &Rank, dtype: Dtype, keys: &str) -> Result<Config, Box<dyn Error>> {
    let folder = shared_folder(rank)?;
    if rank.index() == 0 {
        std::fs::write(folder.join("config.json"), format!("{{{SIZES}, {keys}}}"))?;
    }
    rank.barrier()?;
    let mut config = job(dtype);
    config.model = ModelSection {
        hf_assets_path: Some(folder),
        ..ModelSection::default()
    };
    Ok(config)
}

/// All blocks of DeepSeek without experts, or all but the first with them.
fn deepseek(rank: &Rank, dtype: Dtype, num_dense: usize) -> Result<Config, Box<dyn Error>> {
    family(rank, dtype, &format!("{DEEPSEEK}: {num_dense}"))
}

fn shared(rank: &Rank, config: &Config) -> Vec<Config> {
    let shared = SEQUENCES.map(|sequence| tensor_parallel(config, rank.size(), sequence));
    shared.to_vec()
}

fn others(rank: &Rank, config: &Config, methods: &[ContextMethod]) -> Vec<Config> {
    let cut = methods.iter();
    let cut = cut.map(|method| context_parallel(config, rank.size(), *method));
    let mut sharded = config.clone();
    sharded.parallelism.data_parallel_shard_degree = -1;
    sharded.parallelism.zero_stage = 3;
    cut.chain([sharded, piped(config, rank.size(), "1f1b")])
        .collect()
}

/// Ring attention has no windows.
pub fn gemma3(rank: &Rank) -> Outcome {
    let config = family(rank, Dtype::Float64, GEMMA3)?;
    let methods = [ContextMethod::Ulysses];
    let all = [shared(rank, &config), others(rank, &config, &methods)].concat();
    equal_one_rank(rank, &config, Dtype::Float64, &all)
}

pub fn olmo2(rank: &Rank) -> Outcome {
    let config = family(rank, Dtype::Float64, OLMO2)?;
    let all = [shared(rank, &config), others(rank, &config, &METHODS)].concat();
    equal_one_rank(rank, &config, Dtype::Float64, &all)
}

pub fn latent(rank: &Rank) -> Outcome {
    let config = deepseek(rank, Dtype::Float64, 4)?;
    let all = [shared(rank, &config), others(rank, &config, &METHODS)].concat();
    equal_one_rank(rank, &config, Dtype::Float64, &all)
}

/// Experts in groups, with latent attention.
pub fn experts(rank: &Rank) -> Outcome {
    let config = deepseek(rank, Dtype::Float64, 1)?;
    let mut tensor = tensor_parallel(&config, rank.size(), SequenceParallel::SaveGathered);
    tensor.parallelism.expert_parallel_degree = rank.size() as i64;
    let mut all = others(rank, &config, &METHODS);
    all.push(tensor);
    equal_one_rank(rank, &config, Dtype::Float64, &all)
}

pub fn bytes(rank: &Rank) -> Outcome {
    let single = |keys| family(rank, Dtype::Float32, keys);
    let configs = [
        single(GEMMA3)?,
        single(OLMO2)?,
        deepseek(rank, Dtype::Float32, 4)?,
    ];
    for config in configs {
        for variant in shared(rank, &config) {
            check(rank, &variant)?;
        }
        check(
            rank,
            &context_parallel(&config, rank.size(), ContextMethod::Ulysses),
        )?;
    }
    Ok(())
}
