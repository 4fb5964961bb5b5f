//! A job resumes only what is its own, and shares its checkpoint folder with no other job.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use libtest_mimic::Failed;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use trainyard_conformance::programs::{Running, describe, find, repository, run};
use trainyard_launcher::REJECTED;

use super::train::train_command;

const EXIT_CODE: i32 = REJECTED as i32;

fn command(folder: &Path, keys: &str) -> Result<Command, Failed> {
    let keys = format!(
        "--lr_scheduler.warmup_steps 1 --checkpoint.enable true --checkpoint.interval 2 {keys}"
    );
    let mut command = train_command("llama-tiny", 2, &keys)?;
    command.arg("--job.dump_folder").arg(folder);
    Ok(command)
}

/// Each change of the job is rejected with its name, and accepted if the user allows it.
pub fn changes_need_a_word() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    run(&mut command(folder.path(), "--training.steps 4")?)?;
    for (change, name) in [
        ("--training.steps 6 --debug.seed 7", "seed"),
        ("--training.steps 6 --training.seq_len 64", "dataset"),
        ("--training.steps 6 --optimizer.name SGD", "optimizer"),
        ("--training.steps 6 --training.local_batch_size 2", "batch"),
        ("--training.steps 2", "steps"),
    ] {
        let output = command(folder.path(), change)?.output()?;
        let text = describe(&output);
        assert_eq!(output.status.code(), Some(EXIT_CODE), "{change}: {text}");
        let hint = format!("--checkpoint.allow {name}");
        assert!(text.contains(&hint), "{change}: {text}");
    }
    let allowed =
        "--training.steps 6 --debug.seed 7 --optimizer.name SGD --checkpoint.allow seed,optimizer";
    let text = describe(&run(&mut command(folder.path(), allowed)?)?);
    assert!(
        text.contains("optimizer.name was AdamW and is Sgd"),
        "{text}"
    );
    Ok(())
}

/// A second job in the folder of a job that runs ends at once and changes nothing.
pub fn two_jobs() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    // It runs until it is preempted.
    let mut first = command(folder.path(), "--training.steps 1000000")?;
    let mut first = Running(first.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
    let owner = folder.path().join("checkpoint/owner.json");
    while !owner.exists() {
        assert!(first.0.try_wait()?.is_none(), "the first job has ended");
        std::thread::yield_now();
    }
    let output = command(folder.path(), "--training.steps 4")?.output()?;
    let text = describe(&output);
    assert_eq!(output.status.code(), Some(EXIT_CODE), "{text}");
    assert!(text.contains("is in use by run"), "{text}");
    let pid = Pid::from_child(&first.0);
    kill_process(pid, Signal::TERM)?;
    let preempted = Some(128 + Signal::TERM.as_raw());
    assert_eq!(first.0.wait()?.code(), preempted, "it was disturbed");
    for entry in fs::read_dir(folder.path().join("checkpoint"))? {
        let path = entry?.path();
        if path.is_dir() {
            run(Command::new(find("trainyard")?)
                .args(["ckpt", "verify"])
                .arg(path))?;
        }
    }
    Ok(())
}

/// Ranks with different configs do not train together.
pub fn ranks_agree_on_the_job() -> Result<(), Failed> {
    let program = find("trainyard")?;
    let script = format!(
        "exec {} train configs/llama-tiny.toml --training.steps 2 --lr_scheduler.warmup_steps 1 --debug.seed $RANK",
        program.display()
    );
    let output = Command::new(&program)
        .args([
            "run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "3",
        ])
        .args(["--", "sh", "-c", &script])
        .current_dir(repository("."))
        .output()?;
    let text = describe(&output);
    assert_eq!(output.status.code(), Some(EXIT_CODE), "{text}");
    assert!(text.contains("rank 0, 1 has another config"), "{text}");
    Ok(())
}
