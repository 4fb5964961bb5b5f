//! `train` learns, saves and resumes.

use std::fs;
use std::path::Path;
use std::process::Command;

use libtest_mimic::Failed;
use serde::Deserialize;
use serde_json::Value;
use tempfile::TempDir;
use trainyard_conformance::programs::{describe, find, json, run};
use trainyard_conformance::training::assert_close;

use super::trainyard;

/// One line of `metrics.jsonl`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Metrics {
    step: u64,
    pub loss: f64,
    grad_norm: f64,
    lr: f64,
}

/// Trains configs/llama-tiny.toml with further keys on `num_ranks` ranks, with output in `folder`.
pub fn train(folder: &Path, num_ranks: usize, keys: &str) -> Result<Vec<Metrics>, Failed> {
    train_config("llama-tiny", folder, num_ranks, keys)
}

fn train_config(
    config: &str,
    folder: &Path,
    num_ranks: usize,
    keys: &str,
) -> Result<Vec<Metrics>, Failed> {
    run(train_command(config, num_ranks, keys)?
        .arg("--job.dump_folder")
        .arg(folder))?;
    let text = fs::read_to_string(folder.join("metrics.jsonl"))?;
    text.lines()
        .map(|line| Ok(serde_json::from_str(line)?))
        .collect()
}

pub fn train_command(config: &str, num_ranks: usize, keys: &str) -> Result<Command, Failed> {
    let line = format!(
        "run --standalone --nproc-per-node {num_ranks} -- {} train configs/{config}.toml \
         --metrics.log_freq 1 --metrics.enable_jsonl true {keys}",
        find("trainyard")?.display()
    );
    trainyard(&line)
}

pub fn training_learns() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let metrics = train(folder.path(), 2, "")?;
    assert_eq!(metrics.len(), 60);
    let (first, last) = (metrics[0].loss, metrics[59].loss);
    assert!(last < first - 0.5, "the loss went from {first} to {last}");
    Ok(())
}

/// Convolution kernels allocate memory in their own way, which the memory observer must support.
pub fn cnn_trains() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let metrics = train_config("cnn", folder.path(), 2, "--training.steps 3")?;
    assert_eq!(metrics.len(), 3);
    assert!(
        metrics
            .iter()
            .all(|m| m.loss.is_finite() && m.grad_norm > 0.0),
        "{metrics:?}"
    );
    Ok(())
}

/// The levels of a memory chart: bytes by kind.
fn levels(page: &Path) -> Result<Vec<[u64; 6]>, Failed> {
    let text = fs::read_to_string(page)?;
    let mut lines = text.lines();
    let line = lines.find_map(|line| line.strip_prefix("const chart = "));
    let data = line.and_then(|line| line.strip_suffix(';'));
    let data: Value = serde_json::from_str(data.ok_or("a picture without data")?)?;
    Ok(serde_json::from_value(data["bytes"].clone())?)
}

pub fn memory_is_drawn() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let page = folder.path().join("out.html");
    let few = "--training.steps 3 --lr_scheduler.warmup_steps 2";
    // A dry run counts the receive buffers that ranks of several nodes need.
    let network = "--comm.shared_memory false";
    let keys = format!("{few} {network} --profiling.memory {}", page.display());
    let mut command = train_command("llama-tiny", 2, &keys)?;
    let output = run(command.arg("--job.dump_folder").arg(folder.path()))?;
    assert!(
        describe(&output).contains("memory: peak "),
        "{}",
        describe(&output)
    );

    let line = "dry-run configs/llama-tiny.toml --world 2 --json";
    let predicted: Value = json(&run(&mut trainyard(line)?)?)?;
    let predicted = predicted["peak_bytes"].as_f64().ok_or("no peak_bytes")?;
    for page in [page, folder.path().join("out.rank1.html")] {
        let levels = levels(&page)?;
        let parameters = 4 * 1_049_728;
        assert!(
            levels
                .iter()
                .all(|level| level[0] == parameters && level[2] >= 2 * parameters)
        );
        let peak = levels.iter().map(|level| level.iter().sum::<u64>()).max();
        let peak = peak.ok_or("a picture without levels")? as f64;
        assert_close("peak", &[peak], &[predicted], 0.02);
    }
    Ok(())
}

const SAVING: &str =
    "--checkpoint.enable true --checkpoint.interval 3 --lr_scheduler.warmup_steps 2";

pub fn resume() -> Result<(), Failed> {
    let (uninterrupted, resumed) = (TempDir::new()?, TempDir::new()?);
    let expected = train(
        uninterrupted.path(),
        2,
        &format!("{SAVING} --training.steps 6"),
    )?;
    train(resumed.path(), 2, &format!("{SAVING} --training.steps 3"))?;
    let found = train(resumed.path(), 2, &format!("{SAVING} --training.steps 6"))?;
    let steps: Vec<u64> = found.iter().map(|metrics| metrics.step).collect();
    assert_eq!(
        steps,
        [1, 2, 3, 4, 5, 6],
        "it did not go on where it had ended"
    );
    assert_eq!(found, expected);
    Ok(())
}

/// The same bits with and without offload, before and after a checkpoint that each of them writes for the other.
pub fn resume_offloaded() -> Result<(), Failed> {
    let (uninterrupted, resumed) = (TempDir::new()?, TempDir::new()?);
    let sharded = format!(
        "{SAVING} --parallelism.data_parallel_shard_degree -1 --training.mixed_precision_param bfloat16"
    );
    let offloaded = format!("{sharded} --parallelism.offload cpu");
    let optimizer =
        format!("{offloaded} --parallelism.zero_stage 2 --parallelism.offload_states optimizer");
    let expected = train(
        uninterrupted.path(),
        2,
        &format!("{sharded} --training.steps 12"),
    )?;
    let mut found = Vec::new();
    for (keys, steps) in [
        (&offloaded, 3),
        (&sharded, 6),
        (&optimizer, 9),
        (&offloaded, 12),
    ] {
        found = train(
            resumed.path(),
            2,
            &format!("{keys} --training.steps {steps}"),
        )?;
    }
    assert_eq!(found, expected);
    Ok(())
}

pub fn resume_elsewhere() -> Result<(), Failed> {
    let (uninterrupted, resumed) = (TempDir::new()?, TempDir::new()?);
    let expected = train(
        uninterrupted.path(),
        2,
        &format!("{SAVING} --training.steps 6"),
    )?;
    train(resumed.path(), 2, &format!("{SAVING} --training.steps 3"))?;
    let alone = format!("{SAVING} --training.steps 6 --training.local_batch_size 8");
    let found = train(resumed.path(), 1, &alone)?;
    let losses = |run: &[Metrics]| run.iter().map(|metrics| metrics.loss).collect::<Vec<_>>();
    assert_close("loss of step", &losses(&found), &losses(&expected), 1e-5);
    Ok(())
}

/// From three shards to two replicas, to two shards with ZeRO 1, to one rank.
pub fn resume_sharded() -> Result<(), Failed> {
    let (uninterrupted, split) = (TempDir::new()?, TempDir::new()?);
    let expected = train(
        uninterrupted.path(),
        1,
        "--training.steps 8 --lr_scheduler.warmup_steps 2 --training.local_batch_size 12",
    )?;
    let common = "--checkpoint.enable true --checkpoint.interval 2 --lr_scheduler.warmup_steps 2 \
                  --training.global_batch_size 12";
    let shard = "--parallelism.data_parallel_shard_degree -1 --parallelism.data_parallel_replicate_degree 1";
    let mut found = Vec::new();
    for (steps, num_ranks, keys) in [
        (2, 3, format!("{shard} --training.local_batch_size 4")),
        (4, 2, "--training.local_batch_size 6".to_owned()),
        (
            6,
            2,
            format!("{shard} --parallelism.zero_stage 1 --training.local_batch_size 6"),
        ),
        (8, 1, "--training.local_batch_size 12".to_owned()),
    ] {
        let keys = format!("{common} {keys} --training.steps {steps}");
        found = train(split.path(), num_ranks, &keys)?;
    }
    let losses = |run: &[Metrics]| run.iter().map(|metrics| metrics.loss).collect::<Vec<_>>();
    assert_close("loss of step", &losses(&found), &losses(&expected), 1e-5);
    Ok(())
}

/// A file is in the way of the last checkpoint.
pub fn lost_end() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let checkpoints = folder.path().join("checkpoint");
    fs::create_dir(&checkpoints)?;
    fs::write(checkpoints.join("step-3"), "no folder")?;
    let keys = "--training.steps 3 --lr_scheduler.warmup_steps 1 --checkpoint.enable true --checkpoint.interval 2 \
                --checkpoint.resume false";
    let ended = train(folder.path(), 2, keys);
    let words = format!("{:?}", ended.err());
    assert!(
        words.contains("the final checkpoint, of step 3,"),
        "{words}"
    );
    assert!(checkpoints.join("step-2").is_dir(), "{words}");
    let metrics = fs::read_to_string(folder.path().join("metrics.jsonl"))?;
    assert_eq!(metrics.lines().count(), 3, "it trained to its end");
    Ok(())
}

/// Twice over 32 digits in batches of 8: eight steps, and an endless dataset is rejected.
pub fn epochs() -> Result<(), Failed> {
    let (digits, folder) = (TempDir::new()?, TempDir::new()?);
    write_digits(digits.path(), 32)?;
    let keys = format!(
        "--training.dataset mnist --training.dataset_path {} --training.epochs 2 --training.local_batch_size 4 \
         --training.num_loader_threads 2 --lr_scheduler.warmup_steps 1",
        digits.path().display()
    );
    let metrics = train_config("cnn", folder.path(), 2, &keys)?;
    assert_eq!(metrics.len(), 8);
    let endless = TempDir::new()?;
    let failed = train_config("cnn", endless.path(), 1, "--training.epochs 2");
    let message = failed
        .err()
        .and_then(|failed| failed.message().map(str::to_owned));
    let message = message.ok_or("epochs of endless data were accepted")?;
    assert!(message.contains("training.epochs"), "{message}");
    Ok(())
}

/// Writes IDX files with this many digits, all black.
fn write_digits(folder: &Path, num: u32) -> Result<(), Failed> {
    let header = |numbers: &[u32]| -> Vec<u8> {
        let bytes = numbers.iter().flat_map(|number| number.to_be_bytes());
        bytes.collect()
    };
    let (mut images, mut labels) = (header(&[0x803, num, 28, 28]), header(&[0x801, num]));
    images.resize(images.len() + num as usize * 28 * 28, 0);
    labels.extend((0..num).map(|index| (index % 10) as u8));
    fs::write(folder.join("train-images-idx3-ubyte"), images)?;
    fs::write(folder.join("train-labels-idx1-ubyte"), labels)?;
    Ok(())
}
