//! The programs as people use them: verify, dry-run, run, train.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde_json::Value;
use tempfile::TempDir;
use trainyard_conformance::in_turn;
use trainyard_conformance::programs::{Running, find, json, processes, repository, run, told};
use trainyard_conformance::training::assert_close;

type Test = fn() -> Result<(), Failed>;

fn main() -> ExitCode {
    let tests: [(&str, Test); 19] = [
        ("verify_passes", verify_passes),
        ("verify_notices_an_unreduced_gradient", verify_notices),
        ("verify_shrinks_a_70b_config", verify_shrinks),
        ("verify_passes_for_every_stage_of_sharding", verify_sharded),
        (
            "verify_passes_for_shared_layers_and_sequences",
            verify_layers,
        ),
        ("a_70b_model_is_dry_run_on_this_machine", dry_run_70b),
        ("a_70b_model_sharded_is_dry_run_too", dry_run_70b_sharded),
        (
            "a_405b_model_with_shared_layers_is_dry_run_too",
            dry_run_405b,
        ),
        (
            "every_stage_of_a_405b_pipeline_is_dry_run",
            dry_run_405b_pipeline,
        ),
        ("a_dry_run_predicts_the_measured_peak", dry_run_predicts),
        (
            "four_ranks_train_sequences_that_one_cannot_hold",
            long_context,
        ),
        (
            "too_big_for_ddp_trains_sharded_and_offloaded",
            too_big_for_one,
        ),
        ("training_learns", training_learns),
        ("the_cnn_trains_too", cnn_trains),
        ("the_memory_of_a_step_is_drawn", memory_is_drawn),
        ("a_resumed_run_goes_on_to_the_bit", resume),
        (
            "a_checkpoint_fits_another_number_of_ranks",
            resume_elsewhere,
        ),
        ("a_sharded_checkpoint_fits_any_other_mesh", resume_sharded),
        ("a_killed_rank_is_named_and_the_others_end", killed_rank),
    ];
    in_turn(
        tests
            .into_iter()
            .map(|(name, test)| Trial::test(name, test))
            .collect(),
    )
}

fn trainyard(line: &str) -> Result<Command, Failed> {
    let mut command = Command::new(find("trainyard")?);
    command
        .args(line.split_whitespace())
        .current_dir(repository("."));
    Ok(command)
}

// --- verify -----------------------------------------------------------------------------------

/// The rows of a verification's table, with the types they were compared in.
fn rows(report: &Value) -> Vec<(String, Value)> {
    let comparisons = report["comparisons"].as_array().into_iter().flatten();
    comparisons
        .flat_map(|comparison| {
            let types = comparison["types"].as_str().unwrap_or_default().to_owned();
            let rows = comparison["rows"].as_array().cloned().unwrap_or_default();
            rows.into_iter().map(move |row| (types.clone(), row))
        })
        .collect()
}

fn is_within(row: &Value) -> bool {
    row["worst"].as_f64() <= row["allowed"].as_f64() && row["worst"].is_number()
}

fn assert_passes(output: &Output, types: &[&str]) -> Result<(), Failed> {
    assert!(output.status.success(), "{}", told(output));
    let report: Value = json(output)?;
    assert_eq!(report["passed"], true, "{report}");
    let rows = rows(&report);
    for each in types {
        assert!(
            rows.iter().filter(|(t, _)| t == each).count() >= 6,
            "{each} in {report}"
        );
    }
    assert!(rows.iter().all(|(_, row)| is_within(row)), "{report}");
    Ok(())
}

fn verify_passes() -> Result<(), Failed> {
    let output = trainyard("verify configs/llama-tiny.toml --nproc 2 --json")?.output()?;
    assert_passes(&output, &["float64", "float32"])
}

fn verify_sharded() -> Result<(), Failed> {
    for stage in 1..=3 {
        let line = format!(
            "verify configs/llama-tiny.toml --nproc 2 --steps 3 --json \
             --parallelism.data_parallel_shard_degree -1 --parallelism.zero_stage {stage}"
        );
        let output = trainyard(&line)?.output()?;
        assert_passes(&output, &["float64", "float32"])?;
    }
    Ok(())
}

fn verify_layers() -> Result<(), Failed> {
    for line in [
        "configs/llama-tiny-tp.toml --nproc 2",
        "configs/llama-tiny-tp.toml --nproc 2 --parallelism.sequence_parallel_regather true",
        "configs/llama-tiny-tp.toml --nproc 4 --parallelism.data_parallel_shard_degree -1",
        "configs/llama-tiny-3d.toml --nproc 8",
        "configs/llama-tiny-cp.toml --nproc 2",
        "configs/llama-tiny-cp.toml --nproc 2 --parallelism.context_parallel_method ulysses",
    ] {
        let output = trainyard(&format!("verify {line} --steps 3 --json"))?.output()?;
        assert_passes(&output, &["float64", "float32"])?;
        assert!(told(&output).contains("activation bytes sent"), "{line}");
    }
    let line = "verify configs/llama3-405b.toml --nproc 8 --shrink --steps 2 --json";
    assert_passes(&trainyard(line)?.output()?, &["float64", "bfloat16"])
}

fn verify_notices() -> Result<(), Failed> {
    let line =
        "verify configs/llama-tiny.toml --nproc 2 --steps 2 --json --sabotage unreduced-gradient";
    let output = trainyard(line)?.output()?;
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
    let report: Value = json(&output)?;
    assert_eq!(report["passed"], false, "{report}");
    for types in ["float64", "float32"] {
        let failed: Vec<Value> = rows(&report)
            .into_iter()
            .filter(|(t, row)| t == types && !is_within(row))
            .map(|(_, row)| row)
            .collect();
        let names_a_parameter = |row: &Value| {
            row["what"]
                .as_str()
                .is_some_and(|what| what.contains("parameters"))
                && row["at"].as_str().is_some_and(|at| at.contains(".weight"))
        };
        assert!(failed.iter().any(names_a_parameter), "{types}: {failed:?}");
    }
    Ok(())
}

fn verify_shrinks() -> Result<(), Failed> {
    let line = "verify configs/llama3-70b.toml --nproc 2 --shrink --json";
    assert_passes(&trainyard(line)?.output()?, &["float64", "bfloat16"])
}

// --- dry-run ----------------------------------------------------------------------------------

/// Runs a command to its end; gives the most memory it had resident too.
fn watched(command: &mut Command) -> Result<(Output, u64), Failed> {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let status = PathBuf::from(format!("/proc/{}/status", child.id()));
    let mut peak = 0;
    // What it prints fits into a pipe. The kernel keeps the peak, so that looking now and then is
    // enough; when the process has ended it is gone.
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

fn dry_run_70b() -> Result<(), Failed> {
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

/// Every rank of 512 holds 16 bytes per parameter over 512, and a little padding.
fn dry_run_70b_sharded() -> Result<(), Failed> {
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

/// Eight ranks share every matrix and 128 their states. A block has four sums of its positions, the
/// embedding and the head one each.
fn dry_run_405b() -> Result<(), Failed> {
    let line = "dry-run configs/llama3-405b.toml --world 1024 --json \
                --training.mixed_precision_reduce bfloat16";
    let found: Value = json(&run(&mut trainyard(line)?)?)?;
    assert_eq!(found["num_parameters"], 405_853_388_800u64);
    assert_eq!(found["states"], found["states_by_formula"]);
    let states = found["states"].as_object().ok_or("no states")?;
    let total: u64 = states.values().filter_map(Value::as_u64).sum();
    // Every rank of the eight holds all norms.
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

/// 8,192 ranks: tp 8, pp 16, dp 64. The first stage keeps most micro-batches, the last has the head.
fn dry_run_405b_pipeline() -> Result<(), Failed> {
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

/// What one rank can just hold is a limit under which four share a sequence 3.5 times as long.
fn long_context() -> Result<(), Failed> {
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
    let refused = train_command("llama-tiny", 1, &limited(1, length))?.output()?;
    assert!(
        told(&refused).contains("memory_limit_bytes"),
        "{}",
        told(&refused)
    );
    assert!(!refused.status.success());
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

/// Nine million parameters on ranks that may hold a hundred megabytes: DDP needs 16 bytes for each.
fn too_big_for_one() -> Result<(), Failed> {
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
    let refused = command(4, "")?.0.output()?;
    let said = told(&refused);
    assert!(!refused.status.success(), "{said}");
    assert!(said.contains("memory_limit_bytes = 100000000"), "{said}");
    assert!(said.contains("what fits: "), "{said}");
    assert!(said.contains("parallelism.zero_stage = 3"), "{said}");

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

fn dry_run_predicts() -> Result<(), Failed> {
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

// --- train ------------------------------------------------------------------------------------

/// One line of `metrics.jsonl`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
struct Metrics {
    step: u64,
    loss: f64,
    grad_norm: f64,
    lr: f64,
}

/// Trains configs/llama-tiny.toml with further keys on `num_ranks` ranks, writing into `folder`.
fn train(folder: &Path, num_ranks: usize, keys: &str) -> Result<Vec<Metrics>, Failed> {
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

fn train_command(config: &str, num_ranks: usize, keys: &str) -> Result<Command, Failed> {
    let line = format!(
        "run --standalone --nproc-per-node {num_ranks} -- {} train configs/{config}.toml \
         --metrics.log_freq 1 --metrics.enable_jsonl true {keys}",
        find("trainyard")?.display()
    );
    trainyard(&line)
}

fn training_learns() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let metrics = train(folder.path(), 2, "")?;
    assert_eq!(metrics.len(), 60);
    let (first, last) = (metrics[0].loss, metrics[59].loss);
    assert!(last < first - 0.5, "the loss went from {first} to {last}");
    Ok(())
}

/// Its kernels ask for memory in their own way, which counting memory must allow.
fn cnn_trains() -> Result<(), Failed> {
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

/// The levels in a picture of memory: bytes by kind.
fn levels(page: &Path) -> Result<Vec<[u64; 6]>, Failed> {
    let text = fs::read_to_string(page)?;
    let mut lines = text.lines();
    let line = lines.find_map(|line| line.strip_prefix("const chart = "));
    let data = line.and_then(|line| line.strip_suffix(';'));
    let data: Value = serde_json::from_str(data.ok_or("a picture without data")?)?;
    Ok(serde_json::from_value(data["held"].clone())?)
}

fn memory_is_drawn() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let page = folder.path().join("out.html");
    let few = "--training.steps 3 --lr_scheduler.warmup_steps 2";
    let keys = format!("{few} --profiling.memory {}", page.display());
    let mut command = train_command("llama-tiny", 2, &keys)?;
    let output = run(command.arg("--job.dump_folder").arg(folder.path()))?;
    assert!(told(&output).contains("memory: peak "), "{}", told(&output));

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

fn resume() -> Result<(), Failed> {
    let (whole, halves) = (TempDir::new()?, TempDir::new()?);
    let expected = train(whole.path(), 2, &format!("{SAVING} --training.steps 6"))?;
    train(halves.path(), 2, &format!("{SAVING} --training.steps 3"))?;
    let found = train(halves.path(), 2, &format!("{SAVING} --training.steps 6"))?;
    let steps: Vec<u64> = found.iter().map(|metrics| metrics.step).collect();
    assert_eq!(
        steps,
        [1, 2, 3, 4, 5, 6],
        "it did not go on where it had ended"
    );
    assert_eq!(found, expected);
    Ok(())
}

fn resume_elsewhere() -> Result<(), Failed> {
    let (whole, halves) = (TempDir::new()?, TempDir::new()?);
    let expected = train(whole.path(), 2, &format!("{SAVING} --training.steps 6"))?;
    train(halves.path(), 2, &format!("{SAVING} --training.steps 3"))?;
    let alone = format!("{SAVING} --training.steps 6 --training.local_batch_size 8");
    let found = train(halves.path(), 1, &alone)?;
    let losses = |run: &[Metrics]| run.iter().map(|metrics| metrics.loss).collect::<Vec<_>>();
    assert_close("loss of step", &losses(&found), &losses(&expected), 1e-5);
    Ok(())
}

/// From three shards to two copies, to two shards of stage 1, to one rank.
fn resume_sharded() -> Result<(), Failed> {
    let (whole, pieces) = (TempDir::new()?, TempDir::new()?);
    let expected = train(
        whole.path(),
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
        found = train(pieces.path(), num_ranks, &keys)?;
    }
    let losses = |run: &[Metrics]| run.iter().map(|metrics| metrics.loss).collect::<Vec<_>>();
    assert_close("loss of step", &losses(&found), &losses(&expected), 1e-5);
    Ok(())
}

// --- a rank is killed -------------------------------------------------------------------------

const NUM_RANKS: usize = 3;
const SOON: Duration = Duration::from_secs(5);

fn killed_rank() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let mark = format!("TRAINYARD_TEST_MARK={}", folder.path().display());
    let endless = "--training.steps 1000000";
    let mut command = train_command("llama-tiny", NUM_RANKS, endless)?;
    command
        .arg("--job.dump_folder")
        .arg(folder.path())
        .env("TRAINYARD_TEST_MARK", folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut job = Running(command.spawn()?);
    let mut lines = BufReader::new(job.0.stdout.take().ok_or("no stdout")?).lines();
    // In the middle of the steps, and by now in no step in particular.
    let is_third = |line: &str| line.contains("step:") && line.contains(" 3 ");
    let mut told = lines.by_ref().map_while(Result::ok);
    assert!(
        told.any(|line| is_third(&line)),
        "the job did not get to step 3"
    );

    let victims = processes(&[&mark, "RANK=1"]);
    assert_eq!(victims.len(), 1, "processes of rank 1: {victims:?}");
    let killed = Instant::now();
    kill_process(Pid::from_raw(victims[0]).ok_or("pid 0")?, Signal::KILL)?;
    // Whoever still writes holds the pipe open; so this is the end of all of them.
    lines.for_each(drop);
    let status = job.0.wait()?;
    let took = killed.elapsed();
    assert!(
        took < SOON,
        "the job ended {took:?} after rank 1 was killed"
    );
    assert_eq!(status.code(), Some(137));

    let mut report = String::new();
    job.0
        .stderr
        .take()
        .ok_or("no stderr")?
        .read_to_string(&mut report)?;
    let first = format!("rank 1 (pid {}) was killed by SIGKILL", victims[0]);
    assert!(report.contains(&first), "{report}");
    assert_eq!(processes(&[&mark]), Vec::<i32>::new(), "processes are left");
    Ok(())
}
