//! A killed rank ends the job, and the launcher names it.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::time::{Duration, Instant};

use libtest_mimic::Failed;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use trainyard_conformance::programs::{Running, processes};

use super::train::train_command;

const NUM_RANKS: usize = 3;
const SOON: Duration = Duration::from_secs(5);

pub fn killed_rank() -> Result<(), Failed> {
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
    // At an arbitrary point in the middle of training.
    let is_third = |line: &str| line.contains("step:") && line.contains(" 3 ");
    let mut output = lines.by_ref().map_while(Result::ok);
    assert!(
        output.any(|line| is_third(&line)),
        "the job did not get to step 3"
    );

    let victims = processes(&[&mark, "RANK=1"]);
    assert_eq!(victims.len(), 1, "processes of rank 1: {victims:?}");
    let killed = Instant::now();
    kill_process(Pid::from_raw(victims[0]).ok_or("pid 0")?, Signal::KILL)?;
    // A process that still runs keeps the pipe open, so the end of the output is the end of all processes.
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
