//! A job resumes only what is its own, and shares its checkpoint folder with no other job.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use libtest_mimic::Failed;
use tempfile::TempDir;
use trainyard_conformance::programs::{Running, describe, find, run};

use super::train::train_command;

/// `REJECTED` of the launcher.
const EXIT_CODE: i32 = 78;

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
    let mut first = command(folder.path(), "--training.steps 200")?;
    let mut first = Running(first.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
    let owner = folder.path().join("checkpoint/owner.json");
    while !owner.exists() {
        assert!(first.0.try_wait()?.is_none(), "the first job has ended");
        std::thread::yield_now();
    }
    let output = command(folder.path(), "--training.steps 300")?.output()?;
    let text = describe(&output);
    assert_eq!(output.status.code(), Some(EXIT_CODE), "{text}");
    assert!(text.contains("is in use by run"), "{text}");
    assert!(first.0.wait()?.success(), "the first job was disturbed");
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
