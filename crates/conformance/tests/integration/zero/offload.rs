//! Offloaded states give the same result.

use std::path::Path;

use trainyard_config::{Config, Dtype, Offload, OffloadStates};
use trainyard_conformance::training::{debug_llama, divided, train_on};
use trainyard_conformance::{Outcome, Rank};

/// Types in which layers compute: with bfloat16, master weights are offloaded too.
const COMPUTE: [Option<Dtype>; 2] = [None, Some(Dtype::Bfloat16)];

fn sharded(rank: &Rank, compute: Option<Dtype>) -> Config {
    let mut config = divided(&debug_llama(Dtype::Float32), rank.size(), 2);
    config.training.steps = 5;
    config.training.mixed_precision_param = compute;
    config.parallelism.data_parallel_shard_degree = -1;
    config
}

fn offloaded(config: &Config, states: OffloadStates, folder: &Path) -> Config {
    let mut config = config.clone();
    config.parallelism.offload = Offload::Nvme;
    config.parallelism.offload_states = states;
    config.parallelism.offload_folder = Some(folder.to_owned());
    config
}

/// In single precision, and with bfloat16 parameters and master weights; with accumulation and every prefetch.
pub fn same_bits(rank: &Rank) -> Outcome {
    let folder = tempfile::tempdir()?;
    for compute in COMPUTE {
        let mut config = sharded(rank, compute);
        let expected = train_on(rank, &config)?.fingerprint();
        for prefetch in [0, 1, 2] {
            config.parallelism.fsdp_prefetch = prefetch;
            let config = offloaded(&config, OffloadStates::All, folder.path());
            let found = train_on(rank, &config)?.fingerprint();
            assert!(found == expected, "{compute:?}, prefetch {prefetch}");
        }
    }
    Ok(())
}

/// Optimizer states alone, in every ZeRO stage.
pub fn optimizer_states(rank: &Rank) -> Outcome {
    let folder = tempfile::tempdir()?;
    for compute in COMPUTE {
        for stage in [1, 2, 3] {
            let mut config = sharded(rank, compute);
            config.parallelism.zero_stage = stage;
            let expected = train_on(rank, &config)?.fingerprint();
            let config = offloaded(&config, OffloadStates::Optimizer, folder.path());
            let found = train_on(rank, &config)?.fingerprint();
            assert!(found == expected, "{compute:?}, stage {stage}");
        }
    }
    Ok(())
}
