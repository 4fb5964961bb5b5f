//! `dry-run` of models that do not fit on this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Failed;
use serde_json::Value;
use tempfile::TempDir;
use trainyard_conformance::programs::{find, json, run};
use trainyard_conformance::training::assert_close;

use super::trainyard;

/// Runs a command until it exits. Also returns its peak resident memory.
fn watched(command: &mut Command) -> Result<(Output, u64), Failed> {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let status = PathBuf::from(format!("/proc/{}/status", child.id()));
    let mut peak = 0;
    // The output fits into a pipe. The kernel records the peak, but only until the process exits, so polling is enough.
    while child.try_wait()?.is_none() {
        peak = peak.max(peak_resident_bytes(&status));
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok((child.wait_with_output()?, peak))
}

fn peak_resident_bytes(status: &Path) -> u64 {
    let text = fs::read_to_string(status).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

pub fn dry_run_70b() -> Result<(), Failed> {
    let started = Instant::now();
    let line = "dry-run configs/llama3-70b.toml --world 1024 --json";
    let (output, peak) = watched(&mut trainyard(line)?)?;
    let took = started.elapsed();
    let found: Value = json(&output)?;
    assert_eq!(found["num_parameters"], 70_553_706_496u64);
    assert_eq!(found["world_size"], 1024);
    let gradients = found["collectives"].as_array().into_iter().flatten();
    let payload: u64 = gradients
        .filter(|row| row["purpose"] == "gradient")
        .filter_map(|row| row["payload_bytes"].as_u64())
        .sum();
    assert_eq!(payload, 4 * 70_553_706_496);
    assert!(took < Duration::from_secs(60), "took {took:?}");
    assert!(peak > 50 << 20, "the peak was not seen: {peak}");
    assert!(peak < 2 << 30, "{peak} bytes were resident");
    Ok(())
}

/// Each of 512 ranks holds 1/512 of 16 bytes per parameter, and a little padding.
pub fn dry_run_70b_sharded() -> Result<(), Failed> {
    let line = "dry-run configs/llama3-70b.toml --world 512 --json \
                --parallelism.data_parallel_shard_degree -1 \
                --training.mixed_precision_reduce bfloat16";
    let found: Value = json(&run(&mut trainyard(line)?)?)?;
    assert_eq!(found["states"], found["states_by_formula"]);
    let states = found["states"].as_object().ok_or("no states")?;
    let total: u64 = states.values().filter_map(Value::as_u64).sum();
    let expected = 16 * 70_553_706_496 / 512;
    let padding = total - expected;
    assert!(padding < 16 * 82, "{total} bytes, not {expected}");
    Ok(())
}

/// Tensor parallelism over eight ranks, and states sharded over 128. A block has four all-reduces, the embedding and the
/// head have one each.
pub fn dry_run_405b() -> Result<(), Failed> {
    let line = "dry-run configs/llama3-405b.toml --world 1024 --json \
                --training.mixed_precision_reduce bfloat16";
    let found: Value = json(&run(&mut trainyard(line)?)?)?;
    assert_eq!(found["num_parameters"], 405_853_388_800u64);
    assert_eq!(found["states"], found["states_by_formula"]);
    let states = found["states"].as_object().ok_or("no states")?;
    let total: u64 = states.values().filter_map(Value::as_u64).sum();
    // The norms are replicated on the eight ranks.
    let norms = (2 * 126 + 1) * 16_384;
    let expected = 16 * ((405_853_388_800 - norms) / 8 + norms) / 128;
    let padding = total.abs_diff(expected);
    assert!(padding < 16 * 128, "{total} bytes, not {expected}");
    let of = |kind: &str, what: &str| {
        let rows = found["collectives"].as_array().into_iter().flatten();
        let found = rows.filter(|row| row["purpose"] == "activation" && row["kind"] == kind);
        found.filter_map(|row| row[what].as_u64()).sum::<u64>()
    };
    assert_eq!(of("reduce_scatter", "count"), 4 * 126 + 2);
    let positions = 8192 * 16_384 * 2;
    assert_eq!(
        of("reduce_scatter", "payload_bytes"),
        (4 * 126 + 2) * positions
    );
    assert_eq!(of("all_gather", "count"), 4 * 126 + 2 + 1);
    Ok(())
}

/// 8,192 ranks: tp 8, pp 16, dp 64. The first stage has most micro-batches in flight, the last has the head.
pub fn dry_run_405b_pipeline() -> Result<(), Failed> {
    let started = Instant::now();
    let mut peaks = Vec::new();
    for stage in [0, 8, 15] {
        let line = format!(
            "dry-run configs/llama3-405b.toml --world 8192 --rank {} --json \
             --parallelism.pipeline_parallel_degree 16 \
             --parallelism.data_parallel_shard_degree 64 \
             --training.global_batch_size 2048",
            stage * 512
        );
        let found: Value = json(&run(&mut trainyard(&line)?)?)?;
        assert_eq!(found["states"], found["states_by_formula"], "stage {stage}");
        peaks.push(found["peak_bytes"].as_u64().ok_or("no peak")?);
    }
    assert!(peaks[0] > peaks[1] && peaks[1] > peaks[2], "{peaks:?}");
    assert!(started.elapsed() < Duration::from_secs(120));
    Ok(())
}

pub fn dry_run_predicts() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let config = folder.path().join("small.toml");
    let text = "[model]\nname = 'llama'\nflavor = 'small'\n\
        [training]\nlocal_batch_size = 8\nseq_len = 256\nmax_norm = 1.0\n\
        [optimizer]\nname = 'AdamW'\n";
    fs::write(&config, text)?;
    let line = format!("dry-run {} --world 1 --json", config.display());
    let predicted: Value = json(&run(&mut trainyard(&line)?)?)?;
    let mut engine = Command::new(find("trainyard-engine")?);
    engine.args([
        "bench-step",
        "--preset",
        "small",
        "--strategy",
        "single",
        "--observe-memory",
    ]);
    let measured: Value = json(&run(engine.args(["--steps", "2", "--warmup", "2"]))?)?;
    let predicted = predicted["peak_bytes"].as_f64().ok_or("no peak_bytes")?;
    let measured = measured["peak_allocated_bytes"]
        .as_f64()
        .ok_or("no peak_allocated_bytes")?;
    assert_close("peak", &[predicted], &[measured], 0.02);
    Ok(())
}

/// What is offloaded is not in memory, except for the unit in use.
pub fn offloaded_states() -> Result<(), Failed> {
    let peak = |keys: &str| -> Result<u64, Failed> {
        let line = format!(
            "dry-run configs/llama-tiny.toml --world 2 --json --parallelism.data_parallel_shard_degree -1 \
             --training.local_batch_size 1 --training.seq_len 16 {keys}"
        );
        let found: Value = json(&run(&mut trainyard(&line)?)?)?;
        Ok(found["peak_bytes"].as_u64().ok_or("no peak_bytes")?)
    };
    let all = "--parallelism.offload cpu";
    let optimizer = format!("{all} --parallelism.offload_states optimizer");
    let (in_memory, optimizer, all) = (peak("")?, peak(&optimizer)?, peak(all)?);
    assert!(all < optimizer, "{all} and {optimizer}");
    // AdamW's moments are two of the four states.
    let moments = 2 * 4 * 1_049_728 / 2;
    assert!(
        optimizer + moments / 2 < in_memory,
        "{optimizer} and {in_memory}"
    );
    Ok(())
}
