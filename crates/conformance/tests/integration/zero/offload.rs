//! Offloaded states give the same result.

use trainyard_config::{Dtype, Offload};
use trainyard_conformance::training::{debug_llama, divided, train_on};
use trainyard_conformance::{Outcome, Rank};

/// In single precision, and with bfloat16 parameters and master weights; with accumulation and every prefetch.
pub fn same_bits(rank: &Rank) -> Outcome {
    let folder = tempfile::tempdir()?;
    for mixed in [None, Some(Dtype::Bfloat16)] {
        let mut config = divided(&debug_llama(Dtype::Float32), rank.size(), 2);
        config.training.steps = 5;
        config.training.mixed_precision_param = mixed;
        config.parallelism.data_parallel_shard_degree = -1;
        let expected = train_on(rank, &config)?.fingerprint();
        for prefetch in [0, 1, 2] {
            config.parallelism.fsdp_prefetch = prefetch;
            config.parallelism.offload = Offload::Nvme;
            config.parallelism.offload_folder = Some(folder.path().to_owned());
            let found = train_on(rank, &config)?.fingerprint();
            assert!(found == expected, "{mixed:?}, prefetch {prefetch}");
        }
    }
    Ok(())
}
