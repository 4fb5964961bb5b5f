//! Recomputation: the same result with less memory.

use trainyard_config::{ActivationCheckpointMode, Config, Dtype};
use trainyard_conformance::training::{Session, debug_llama, divided, train, train_on};
use trainyard_conformance::{Outcome, Rank, is_full_run};
use trainyard_torch::memory;

/// With every ZeRO stage and without sharding, in one of two types, or in both in a full CI run; for attention, every
/// second block, and every block.
pub fn same_bits(rank: &Rank) -> Outcome {
    let all = [0, 1, 2, 3].into_iter().flat_map(|stage| {
        let dtypes = [None, Some(Dtype::Bfloat16)];
        dtypes.map(move |dtype| (stage, dtype))
    });
    for (stage, dtype) in all {
        if dtype.is_some() != (stage == 3) && !is_full_run() {
            continue;
        }
        let mut plain = configured(rank, stage);
        plain.training.mixed_precision_param = dtype;
        let expected = train_on(rank, &plain)?.fingerprint();
        for (mode, option) in [
            (ActivationCheckpointMode::Selective, "attention"),
            (ActivationCheckpointMode::Selective, "2"),
            (ActivationCheckpointMode::Full, "attention"),
        ] {
            let mut config = plain.clone();
            config.activation_checkpoint.mode = mode;
            config.activation_checkpoint.selective_ac_option = option.to_owned();
            let found = train_on(rank, &config)?.fingerprint();
            let what = format!("stage {stage}, {dtype:?}, {mode:?} {option}");
            assert!(found == expected, "{what}");
        }
    }
    Ok(())
}

/// Budgets between the peak without recomputation and with full recomputation: the policy that a dry run selects stays
/// within the budget when it runs.
pub fn budget(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu("memory by kind is counted on the host only") {
        return Ok(());
    }
    memory::observe();
    let config = configured(rank, 3);
    let peak = |config: &Config| -> Result<u64, Box<dyn std::error::Error>> {
        let world = rank.join_config(config)?;
        let held = memory::report()?.total;
        let mut session = Session::new(config, &world)?;
        session.step()?;
        // Batches are read beforehand, as by a loader.
        let batches = session.batches()?;
        memory::reset_peak();
        session.trainer.step(&batches)?;
        Ok(memory::report()?.peak - held)
    };
    let mut full = config.clone();
    full.activation_checkpoint.mode = ActivationCheckpointMode::Full;
    let (most, least) = (peak(&config)?, peak(&full)?);

    assert!(
        least < most,
        "recomputation saves nothing: {least} of {most}"
    );
    for share in [0.15, 0.5, 0.9] {
        let budget = least + ((most - least) as f64 * share) as u64;
        let mut config = config.clone();
        config.activation_checkpoint.mode = ActivationCheckpointMode::MemoryBudget;
        config.activation_checkpoint.memory_budget_bytes = budget;
        let found = peak(&config)?;
        assert!(found <= budget, "{found} bytes under a budget of {budget}");
    }
    let mut config = config;
    config.activation_checkpoint.mode = ActivationCheckpointMode::MemoryBudget;
    config.activation_checkpoint.memory_budget_bytes = least / 2;
    let rejected = train(&config, &*rank.join_config(&config)?).err();
    let rejected = rejected.map(|e| e.to_string()).unwrap_or_default();
    assert!(rejected.contains("raise it by"), "{rejected}");
    Ok(())
}

fn configured(rank: &Rank, stage: usize) -> Config {
    let mut config = divided(&debug_llama(Dtype::Float32), rank.size(), 2);
    config.training.steps = 4;
    config.model.num_hidden_layers = Some(4);
    if stage > 0 {
        config.parallelism.data_parallel_shard_degree = -1;
        config.parallelism.zero_stage = stage;
    }
    config
}
