//! The jobs of the expert tests.

use trainyard_arch::ScoringFunc;
use trainyard_config::{Config, Dtype, MoeSection};
use trainyard_conformance::training::debug_llama;

/// A small model with experts in all but its first block, with shared experts and all balancing methods.
pub fn job(dtype: Dtype) -> Config {
    let mut config = debug_llama(dtype);
    config.training.steps = 6;
    config.model.num_hidden_layers = Some(3);
    config.model.moe = Some(MoeSection {
        num_experts: Some(8),
        num_experts_per_tok: Some(2),
        moe_intermediate_size: Some(32),
        n_shared_experts: Some(1),
        first_k_dense_replace: Some(1),
        router_aux_loss_coef: Some(1e-2),
        router_z_loss_coef: Some(1e-3),
        ..MoeSection::default()
    });
    config
}

/// The same with a changed `[model.moe]` section.
pub fn with(config: &Config, change: impl FnOnce(&mut MoeSection)) -> Config {
    let mut config = config.clone();
    change(config.model.moe.get_or_insert_default());
    config
}

/// As in Mixtral: experts in every block, no shared ones, no balancing loss.
pub fn mixtral(dtype: Dtype) -> Config {
    with(&job(dtype), |moe| {
        *moe = MoeSection {
            num_experts: Some(8),
            ..MoeSection::default()
        };
    })
}

/// As in DeepSeek-V3: sigmoid scores, balanced by a bias.
pub fn deepseek(dtype: Dtype) -> Config {
    with(&job(dtype), |moe| {
        moe.scoring_func = Some(ScoringFunc::Sigmoid);
        moe.routed_scaling_factor = Some(1.5);
        moe.bias_update_rate = Some(1e-2);
        moe.num_experts_per_tok = Some(3);
    })
}

/// The config with degrees of `ep`, `dp_shard` and `dp_replicate`, and a ZeRO stage.
pub fn laid_out(config: &Config, ep: i64, shard: i64, replicate: i64, stage: usize) -> Config {
    let mut config = config.clone();
    let section = &mut config.parallelism;
    section.expert_parallel_degree = ep;
    section.data_parallel_shard_degree = shard;
    section.data_parallel_replicate_degree = replicate;
    section.zero_stage = stage;
    config
}
