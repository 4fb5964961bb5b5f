//! A job that is killed repeatedly and restarted on other numbers of ranks trains on every sample of an epoch once.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use libtest_mimic::Trial;
use rustix::process::{Pid, Signal, kill_process};
use trainyard_conformance::as_trials;
use trainyard_conformance::programs::{Running, find, processes, repository};
use trainyard_data::write_tokens;

const SEQ_LEN: u32 = 16;
const GLOBAL_BATCH: u64 = 12;
const STEPS: u64 = 20;
/// One epoch.
const SAMPLES: u64 = GLOBAL_BATCH * STEPS;
const MARK: &str = "TRAINYARD_TEST_MARK";

/// The tests of this module.
pub fn trials() -> Vec<Trial> {
    as_trials(
        "interrupted",
        &[(
            "every_sample_of_an_epoch_is_seen_once",
            every_sample_of_an_epoch_is_seen_once,
        )],
    )
}

fn every_sample_of_an_epoch_is_seen_once() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let tokens: Vec<u32> = (0..SAMPLES as u32 * SEQ_LEN + 1).map(|i| i % 250).collect();
    write_tokens(folder.path().join("tokens.bin"), &tokens)?;
    // Killed in different steps, each time on another number of ranks; then run to the end.
    for (num_ranks, killed_at) in [(2, Some(5)), (3, Some(9)), (1, Some(14)), (4, None)] {
        run(folder.path(), num_ranks, killed_at)?;
    }
    let mut seen = samples(&folder.path().join("samples"))?;
    seen.sort_unstable();
    assert_eq!(seen, (0..SAMPLES).collect::<Vec<u64>>());
    Ok(())
}

/// Trains; with `killed_at`, kills the job when it has logged that step.
fn run(folder: &Path, num_ranks: usize, killed_at: Option<u64>) -> Result<(), Box<dyn Error>> {
    let mark = format!("{}-{num_ranks}", folder.display());
    let path = |name: &str| folder.join(name).display().to_string();
    let program = find("trainyard")?;
    let mut command = Command::new(&program);
    command
        .current_dir(repository(""))
        .args([
            "run",
            "--standalone",
            "--nproc-per-node",
            &num_ranks.to_string(),
            "--",
        ])
        .arg(&program)
        .args([
            "train",
            "configs/llama-tiny.toml",
            "--metrics.log_freq",
            "1",
        ])
        .args(["--training.steps", &STEPS.to_string()])
        .args(["--training.seq_len", &SEQ_LEN.to_string()])
        .args(["--training.global_batch_size", &GLOBAL_BATCH.to_string()])
        .args([
            "--training.local_batch_size",
            &(GLOBAL_BATCH / num_ranks as u64).to_string(),
        ])
        .args([
            "--training.dataset",
            "tokens",
            "--training.dataset_path",
            &path("tokens.bin"),
        ])
        .args(["--checkpoint.enable", "true", "--checkpoint.interval", "3"])
        .args([
            "--checkpoint.async_mode",
            "async",
            "--job.dump_folder",
            &path(""),
        ])
        .args(["--debug.sample_log_folder", "samples"])
        .env(MARK, &mark)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut job = Running(command.spawn()?);
    let mut lines = BufReader::new(job.0.stdout.take().ok_or("no stdout")?).lines();
    let Some(killed_at) = killed_at else {
        lines.for_each(drop);
        return if job.0.wait()?.success() {
            Ok(())
        } else {
            Err("the job failed".into())
        };
    };
    let is_it = |line: &str| line.contains("step:") && line.contains(&format!(" {killed_at} "));
    let mut output = lines.by_ref().map_while(Result::ok);
    assert!(
        output.any(|line| is_it(&line)),
        "step {killed_at} was never logged"
    );
    for rank in 0..num_ranks {
        for pid in processes(&[&format!("{MARK}={mark}"), &format!("RANK={rank}")]) {
            // It may have exited on its own.
            let _ = kill_process(Pid::from_raw(pid).ok_or("pid 0")?, Signal::KILL);
        }
    }
    lines.for_each(drop);
    job.0.wait()?;
    Ok(())
}

/// A run as logged by a rank: the number of ranks, the step from which it resumed, and its steps.
struct Run {
    num_ranks: u64,
    after: u64,
    steps: BTreeMap<u64, Vec<u64>>,
}

/// The samples that count: steps of a run after the one from which the next run resumed are discarded.
fn samples(folder: &Path) -> Result<Vec<u64>, Box<dyn Error>> {
    // Rank 0 is in every run, however many ranks there are.
    let order = runs(&folder.join("rank0.log"))?;
    let ends: BTreeMap<u64, u64> = order
        .windows(2)
        .map(|pair| (pair[0].num_ranks, pair[1].after))
        .collect();
    assert_eq!(
        ends.len(),
        order.len() - 1,
        "the runs cannot be distinguished"
    );
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        for run in runs(&entry?.path())? {
            let end = ends.get(&run.num_ranks);
            let steps = run.steps.into_iter();
            let counted = steps.filter(|(step, _)| end.is_none_or(|end| step <= end));
            all.extend(counted.flat_map(|(_, samples)| samples));
        }
    }
    Ok(all)
}

fn runs(path: &Path) -> Result<Vec<Run>, Box<dyn Error>> {
    let mut runs: Vec<Run> = Vec::new();
    for line in fs::read_to_string(path)?.lines() {
        if let Some(header) = line.strip_prefix("after step ") {
            let (after, rest) = header.split_once(" on ").ok_or("no ranks")?;
            runs.push(Run {
                num_ranks: rest.trim_end_matches(" ranks").parse()?,
                after: after.parse()?,
                steps: BTreeMap::new(),
            });
            continue;
        }
        let (step, samples) = line.split_once(": ").ok_or("a line without a step")?;
        let samples = samples
            .split(' ')
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let run = runs.last_mut().ok_or("a step before a run")?;
        assert!(
            run.steps.insert(step.parse()?, samples).is_none(),
            "{step} twice in a run"
        );
    }
    Ok(runs)
}
