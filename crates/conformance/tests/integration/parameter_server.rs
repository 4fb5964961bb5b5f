//! Parameter servers: synchronous training equals that of ranks which exchange gradients, to the bit, even if workers and
//! servers are killed; asynchronous training learns, loses no sample, and resumes with other numbers of servers and workers.
//! Workers that take steps of their own equal replicas of one job, and outer steps do not wait for lost or stopped ones.

use std::error::Error;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};

use libtest_mimic::Trial;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use trainyard_conformance::as_trials;
use trainyard_conformance::programs::{Running, describe, find, processes, repository, text};

const MARK: &str = "TRAINYARD_TEST_MARK";
const IS_SERVER: &str = "TRAINYARD_IS_PARAMETER_SERVER=1";
const STEPS: u64 = 24;
/// The step after which a process is killed.
const FAULT_STEP: u64 = 6;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// The tests of this module.
pub fn trials() -> Vec<Trial> {
    as_trials(
        "parameter_server",
        &[
            (
                "synchronous_training_is_equal_to_the_bit",
                synchronous_training_is_equal_to_the_bit,
            ),
            (
                "lost_workers_and_servers_change_nothing",
                lost_workers_and_servers_change_nothing,
            ),
            (
                "asynchronous_training_learns_and_resumes",
                asynchronous_training_learns_and_resumes,
            ),
            (
                "a_run_without_workers_ends_with_their_error",
                a_run_without_workers_ends_with_their_error,
            ),
            (
                "local_updates_equal_those_of_ranks",
                local_updates_equal_those_of_ranks,
            ),
            (
                "a_replica_on_a_mesh_is_restarted_alone",
                a_replica_on_a_mesh_is_restarted_alone,
            ),
            (
                "a_quorum_goes_on_without_the_others",
                a_quorum_goes_on_without_the_others,
            ),
        ],
    )
}

fn synchronous_training_is_equal_to_the_bit() -> Outcome {
    let dir = tempfile::tempdir()?;
    for (num_servers, sharding) in [("1", "1"), ("2", "-1")] {
        let served = Training::new(&dir, &format!("served_{num_servers}"), STEPS);
        let launch = ["--servers", num_servers, "--nproc-per-node", "2"];
        served.finish(&launch, &["--parameter_server.staleness", "0"])?;
        let ranks = Training::new(&dir, &format!("ranks_{num_servers}"), STEPS);
        let degrees = ["--parallelism.data_parallel_shard_degree", sharding];
        ranks.finish(&["--standalone", "--nproc-per-node", "2"], &degrees)?;
        assert_same(&served, &ranks)?;
    }
    Ok(())
}

fn lost_workers_and_servers_change_nothing() -> Outcome {
    let dir = tempfile::tempdir()?;
    let synchronous = [
        "--parameter_server.staleness",
        "0",
        "--checkpoint.memory_interval",
        "1",
    ];
    let launch = [
        "--servers",
        "2",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
    ];
    let quiet = Training::new(&dir, "quiet", STEPS);
    quiet.finish(&launch, &synchronous)?;
    for (name, is_server, sign) in [
        ("worker", false, "worker 0: rank 0"),
        ("server", true, "resumed from step"),
    ] {
        let training = Training::new(&dir, name, STEPS);
        let output = training.finish_with(&launch, &synchronous, |_| training.kill(is_server))?;
        assert!(output.contains(sign), "{name}: {output}");
        assert_same(&training, &quiet)?;
    }
    Ok(())
}

fn asynchronous_training_learns_and_resumes() -> Outcome {
    let dir = tempfile::tempdir()?;
    let unbounded = [
        "--parameter_server.staleness",
        "inf",
        "--training.global_batch_size",
        "8",
        "--training.local_batch_size",
        "2",
        "--parameter_server.balance_batches",
        "true",
    ];
    let first = Training::new(&dir, "asynchronous", STEPS);
    let launch = ["--servers", "1", "--nproc-per-node", "3"];
    let output = first.finish_with(&launch, &unbounded, |_| first.kill(false))?;
    assert!(output.contains("workers are left"), "{output}");
    let begin = loss(&output, 1)?;
    let again = Training::new(&dir, "asynchronous", 2 * STEPS);
    let output = again.finish(&["--servers", "2", "--nproc-per-node", "2"], &unbounded)?;
    assert!(output.contains("resumed from step"), "{output}");
    let end = loss(&output, 2 * STEPS)?;
    assert!(end < 0.8 * begin, "loss {begin} became {end}");
    // The same checkpoint continues without servers.
    let ranks = Training::new(&dir, "asynchronous", 2 * STEPS + 2);
    let output = ranks.finish(&["--standalone", "--nproc-per-node", "2"], &unbounded)?;
    let last = loss(&output, 2 * STEPS + 2)?;
    assert!(last < 1.2 * end, "loss {end} became {last}");
    Ok(())
}

fn a_run_without_workers_ends_with_their_error() -> Outcome {
    let dir = tempfile::tempdir()?;
    let training = Training::new(&dir, "none", STEPS);
    let launch = ["--servers", "1", "--nproc-per-node", "1"];
    let mut command = training.command(&launch, &["--parameter_server.staleness", "4"])?;
    let mut child = Running(
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?,
    );
    let mut log = Log::of(&mut child)?;
    log.wait_for_step(FAULT_STEP)?;
    training.kill(false)?;
    let status = child.0.wait()?;
    let mut errors = String::new();
    if let Some(mut stderr) = child.0.stderr.take() {
        stderr.read_to_string(&mut errors)?;
    }
    assert_eq!(status.code(), Some(128 + 9), "{errors}");
    assert!(
        errors.contains("was killed") || errors.contains("SIGKILL"),
        "{errors}"
    );
    Ok(())
}

const SYNC_STEPS: u64 = 4;
const DILOCO: [&str; 4] = [
    "--local_updates.method",
    "diloco",
    "--local_updates.sync_steps",
    "4",
];

/// With SGD, replicas have no state but their parameters, so it does not matter which worker takes which share.
fn local_updates_equal_those_of_ranks() -> Outcome {
    let dir = tempfile::tempdir()?;
    // Products with powers of two are exact, so that two orders of the same operations have the same result.
    let optimizers = [
        "--optimizer.name",
        "SGD",
        "--optimizer.momentum",
        "0",
        "--local_updates.outer_lr",
        "0.5",
        "--local_updates.outer_momentum",
        "0.5",
    ];
    let settings = [&DILOCO[..], &optimizers].concat();
    let served = Training::new(&dir, "served", STEPS);
    served.finish(&["--servers", "2", "--nproc-per-node", "2"], &settings)?;
    let ranks = Training::new(&dir, "ranks", STEPS);
    let outer = ["--parallelism.data_parallel_outer_degree", "2"];
    let launch = ["--standalone", "--nproc-per-node", "2"];
    ranks.finish(&launch, &[&settings[..], &outer].concat())?;
    let different = differences(
        &served.checkpoint_of(STEPS / SYNC_STEPS),
        &ranks.checkpoint_of(STEPS),
    )?;
    let of_model: Vec<_> = different
        .iter()
        .filter(|name| name.starts_with("model/"))
        .collect();
    assert!(of_model.is_empty(), "{of_model:?}");
    Ok(())
}

/// Two replicas of two ranks each, with ZeRO 3. One rank is killed: its replica restarts, the other one does not.
fn a_replica_on_a_mesh_is_restarted_alone() -> Outcome {
    let dir = tempfile::tempdir()?;
    let sharded = ["--parallelism.data_parallel_shard_degree", "2"];
    // As above: replicas have no state of their own.
    let optimizer = ["--optimizer.name", "SGD", "--optimizer.momentum", "0"];
    let settings = [&DILOCO[..], &sharded, &optimizer].concat();
    let launch = [
        "--servers",
        "1",
        "--nproc-per-node",
        "4",
        "--nproc-per-worker",
        "2",
        "--max-restarts",
        "2",
    ];
    let quiet = Training::new(&dir, "quiet", STEPS * SYNC_STEPS);
    quiet.finish(&launch, &settings)?;
    let training = Training::new(&dir, "killed", STEPS * SYNC_STEPS);
    let output = training.finish_with(&launch, &settings, |_| {
        let pids = processes(&[&training.mark(), "RANK=1"]);
        let pid = pids.first().and_then(|&pid| Pid::from_raw(pid));
        Ok(kill_process(pid.ok_or("no such rank")?, Signal::KILL)?)
    })?;
    assert_eq!(output.matches("restart 1 of 2").count(), 1, "{output}");
    assert!(!output.contains("resumed from step"), "{output}");
    let different = differences(&training.checkpoint_of(STEPS), &quiet.checkpoint_of(STEPS))?;
    assert!(different.is_empty(), "{different:?}");
    Ok(())
}

/// Of three workers, one is stopped for a while and another one is killed: outer steps do not wait for them.
fn a_quorum_goes_on_without_the_others() -> Outcome {
    let dir = tempfile::tempdir()?;
    let quorum = [
        "--local_updates.quorum",
        "1",
        "--local_updates.grace_seconds",
        "0.1",
        "--parameter_server.staleness",
        "inf",
        "--training.local_batch_size",
        "2",
        "--training.global_batch_size",
        "12",
    ];
    let settings = [&DILOCO[..], &quorum].concat();
    let first = Training::new(&dir, "quorum", STEPS * SYNC_STEPS);
    let launch = ["--servers", "1", "--nproc-per-node", "3"];
    let output = first.finish_with(&launch, &settings, |log| {
        let workers = first.processes(false);
        let [one, other, ..] = workers[..] else {
            return Err(format!("workers {workers:?}").into());
        };
        kill_process(one, Signal::STOP)?;
        log.wait_for_step(FAULT_STEP + 4)?;
        kill_process(other, Signal::KILL)?;
        log.wait_for_step(FAULT_STEP + 6)?;
        kill_process(one, Signal::CONT)?;
        Ok(())
    })?;
    assert!(output.contains("workers are left"), "{output}");
    let (begin, end) = (loss(&output, 1)?, loss(&output, STEPS)?);
    assert!(end < 0.7 * begin, "loss {begin} became {end}");
    let again = Training::new(&dir, "quorum", (STEPS + 4) * SYNC_STEPS);
    let output = again.finish(&["--servers", "2", "--nproc-per-node", "2"], &settings)?;
    assert!(output.contains("resumed from step"), "{output}");
    let last = loss(&output, STEPS + 4)?;
    assert!(last < 0.7 * begin, "loss {begin} became {end}, then {last}");
    Ok(())
}

/// A run in a folder of its own.
struct Training {
    folder: PathBuf,
    steps: u64,
}

impl Training {
    fn new(dir: &TempDir, name: &str, steps: u64) -> Training {
        Training {
            folder: dir.path().join(name),
            steps,
        }
    }

    fn mark(&self) -> String {
        format!("{MARK}={}", self.folder.display())
    }

    fn checkpoint(&self) -> PathBuf {
        self.checkpoint_of(self.steps)
    }

    fn checkpoint_of(&self, step: u64) -> PathBuf {
        self.folder.join(format!("checkpoint/step-{step}"))
    }

    fn command(&self, launch: &[&str], settings: &[&str]) -> Outcome<Command> {
        let program = find("trainyard")?;
        let mut command = Command::new(&program);
        command
            .current_dir(repository(""))
            .env(MARK, &self.folder)
            .arg("run")
            .args(launch)
            .arg("--")
            .arg(&program)
            .args(["train", "configs/llama-tiny.toml"])
            .args(["--training.steps", &self.steps.to_string()])
            .args(["--metrics.log_freq", "1", "--checkpoint.enable", "true"])
            .args(["--checkpoint.interval", "1000"])
            .arg("--job.dump_folder")
            .arg(&self.folder)
            .args(settings);
        Ok(command)
    }

    /// Runs to the end; returns the output.
    fn finish(&self, launch: &[&str], settings: &[&str]) -> Outcome<String> {
        let output = self.command(launch, settings)?.output()?;
        let everything = describe(&output);
        assert!(output.status.success(), "{everything}");
        Ok(everything)
    }

    /// As [`Self::finish`]; `fault` happens after some steps, and can wait for more of them.
    fn finish_with(
        &self,
        launch: &[&str],
        settings: &[&str],
        fault: impl FnOnce(&mut Log) -> Outcome,
    ) -> Outcome<String> {
        let mut command = self.command(launch, settings)?;
        let errors = tempfile::tempfile()?;
        command.stdout(Stdio::piped()).stderr(errors.try_clone()?);
        let mut child = Running(command.spawn()?);
        let mut log = Log::of(&mut child)?;
        log.wait_for_step(FAULT_STEP)?;
        fault(&mut log)?;
        log.lines.read_to_string(&mut log.text)?;
        let status = child.0.wait()?;
        let output = log.text + &everything(errors)?;
        assert!(status.success(), "{output}");
        Ok(output)
    }

    /// Kills a server or a worker.
    fn kill(&self, is_server: bool) -> Outcome {
        let pids = self.processes(is_server);
        let pid = pids.first().copied().ok_or("no such process is running")?;
        Ok(kill_process(pid, Signal::KILL)?)
    }

    /// The leader of the servers, or all workers.
    fn processes(&self, is_server: bool) -> Vec<Pid> {
        let mark = self.mark();
        let servers = processes(&[&mark, "RANK=0", IS_SERVER]);
        let pids = processes(&[&mark, "RANK=0"]);
        let pids = pids.into_iter();
        pids.filter(|pid| servers.contains(pid) == is_server)
            .filter_map(Pid::from_raw)
            .collect()
    }
}

/// The output of a run, as far as it was read.
struct Log {
    lines: BufReader<ChildStdout>,
    text: String,
}

impl Log {
    fn of(child: &mut Running) -> Outcome<Log> {
        let stdout = child.0.stdout.take().ok_or("no stdout")?;
        Ok(Log {
            lines: BufReader::new(stdout),
            text: String::new(),
        })
    }

    /// Reads until a step has ended.
    fn wait_for_step(&mut self, step: u64) -> Outcome {
        while loss(&self.text, step).is_err() {
            if self.lines.read_line(&mut self.text)? == 0 {
                return Err(format!("the run ended early: {}", self.text).into());
            }
        }
        Ok(())
    }
}

fn everything(mut file: std::fs::File) -> Outcome<String> {
    let mut bytes = Vec::new();
    std::io::Seek::rewind(&mut file)?;
    file.read_to_end(&mut bytes)?;
    Ok(text(&bytes))
}

/// The loss of a step, as printed.
fn loss(output: &str, step: u64) -> Outcome<f64> {
    let found = output.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| *word != "step:");
        let number: u64 = words.nth(1)?.parse().ok()?;
        let loss = words.nth(1)?.parse().ok()?;
        (number == step).then_some(loss)
    });
    found.ok_or_else(|| format!("no loss of step {step}: {output}").into())
}

/// Whether two runs have the same parameters and optimizer states, to the bit.
fn assert_same(one: &Training, other: &Training) -> Outcome {
    let different = differences(&one.checkpoint(), &other.checkpoint())?;
    assert!(different.is_empty(), "{different:?}");
    Ok(())
}

/// The names of the tensors in which two checkpoints differ.
fn differences(one: &Path, other: &Path) -> Outcome<Vec<String>> {
    let mut command = Command::new(find("trainyard")?);
    let output = command
        .args(["ckpt", "diff", "--json"])
        .args([one, other])
        .output()?;
    let found: serde_json::Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("{error}: {}", describe(&output)))?;
    let names = found.as_array().into_iter().flatten();
    Ok(names
        .map(|difference| difference["name"].as_str().unwrap_or_default().to_owned())
        .collect())
}
