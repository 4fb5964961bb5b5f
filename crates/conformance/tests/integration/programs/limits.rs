//! Jobs that fit only on several ranks.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use libtest_mimic::Failed;
use serde_json::Value;
use tempfile::TempDir;
use trainyard_conformance::programs::{describe, find, json, run};
use trainyard_conformance::training::assert_close;

use super::train::{Metrics, train, train_command};
use super::trainyard;

/// With a memory limit that one rank just meets, four ranks train with sequences that are 3.5 times as long.
pub fn long_context() -> Result<(), Failed> {
    let keys = |cp: usize, length: usize| {
        format!(
            "--training.local_batch_size 1 --model.max_position_embeddings 65536 \
             --training.seq_len {length} --parallelism.context_parallel_degree {cp}"
        )
    };
    let line = format!(
        "dry-run configs/llama-tiny.toml --world 1 --json {}",
        keys(1, 2048)
    );
    let found: Value = json(&run(&mut trainyard(&line)?)?)?;
    let limit = found["peak_bytes"].as_u64().ok_or("no peak")?;
    let limited = |cp, length| {
        let keys = keys(cp, length);
        format!(
            "--training.steps 2 --lr_scheduler.warmup_steps 0 --training.memory_limit_bytes {limit} {keys}"
        )
    };
    let length = 2048 * 7 / 2;
    let rejected = train_command("llama-tiny", 1, &limited(1, length))?.output()?;
    assert!(
        describe(&rejected).contains("memory_limit_bytes"),
        "{}",
        describe(&rejected)
    );
    assert!(!rejected.status.success());
    for method in ["ring", "ulysses"] {
        let folder = TempDir::new()?;
        let keys = format!(
            "{} --parallelism.context_parallel_method {method}",
            limited(4, length)
        );
        let metrics = train(folder.path(), 4, &keys)?;
        assert_eq!(metrics.len(), 2);
        assert!(metrics.iter().all(|m| m.loss.is_finite()), "{metrics:?}");
    }
    Ok(())
}

/// Nine million parameters with a limit of a hundred megabytes per rank: DDP needs 16 bytes per parameter.
pub fn too_big_for_one() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let config = folder.path().join("big.toml");
    let text = "[model]\nname = 'llama'\nflavor = 'tiny'\nnum_hidden_layers = 12\n\
        hidden_size = 256\nintermediate_size = 688\nvocab_size = 512\n\
        [training]\nlocal_batch_size = 1\nglobal_batch_size = 4\nseq_len = 32\nsteps = 4\n\
        memory_limit_bytes = 100_000_000\n[metrics]\nlog_freq = 1\nenable_jsonl = true\n";
    fs::write(&config, text)?;
    let command = |num_ranks: usize, keys: &str| -> Result<(Command, PathBuf), Failed> {
        let dump = TempDir::new_in(folder.path())?.keep();
        let line = format!(
            "run --standalone --nproc-per-node {num_ranks} -- {} train {} --job.dump_folder {} {keys}",
            find("trainyard")?.display(),
            config.display(),
            dump.display()
        );
        Ok((trainyard(&line)?, dump.join("metrics.jsonl")))
    };
    let rejected = command(4, "")?.0.output()?;
    let output = describe(&rejected);
    assert!(!rejected.status.success(), "{output}");
    assert!(
        output.contains("memory_limit_bytes = 100000000"),
        "{output}"
    );
    assert!(output.contains("settings that fit: "), "{output}");
    assert!(output.contains("parallelism.zero_stage = 3"), "{output}");

    let losses = |num_ranks: usize, keys: &str| -> Result<Vec<f64>, Failed> {
        let (mut command, metrics) = command(num_ranks, keys)?;
        run(&mut command)?;
        let read = |line: &str| Ok(serde_json::from_str::<Metrics>(line)?.loss);
        fs::read_to_string(metrics)?.lines().map(read).collect()
    };
    let sharded = losses(4, "--parallelism.data_parallel_shard_degree -1")?;
    let spill = folder.path().join("spill");
    let keys = format!(
        "--parallelism.offload nvme --parallelism.offload_folder {}",
        spill.display()
    );
    let offloaded = losses(1, &keys)?;
    let free = losses(1, "--training.memory_limit_bytes 0")?;
    assert_eq!(sharded.len(), 4);
    assert_close("sharded loss", &sharded, &free, 1e-5);
    assert_close("offloaded loss", &offloaded, &free, 1e-5);
    Ok(())
}
