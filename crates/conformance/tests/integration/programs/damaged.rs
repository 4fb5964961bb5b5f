//! A damaged checkpoint does not end a job that has an older one.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use libtest_mimic::Failed;
use tempfile::TempDir;
use trainyard_conformance::programs::{describe, find};

use super::train::train_command;

/// Trains up to `steps` steps with a checkpoint every second step; the result and its output.
fn train(folder: &Path, steps: u64) -> Result<(bool, String), Failed> {
    let keys = format!(
        "--training.steps {steps} --lr_scheduler.warmup_steps 1 --checkpoint.enable true --checkpoint.interval 2"
    );
    let mut command = train_command("llama-tiny", 2, &keys)?;
    let output = command.arg("--job.dump_folder").arg(folder).output()?;
    Ok((output.status.success(), describe(&output)))
}

/// Flips a bit in the middle of the largest file of a checkpoint.
fn flip_bit(checkpoint: &Path) -> Result<(), Failed> {
    let mut largest = None;
    for entry in fs::read_dir(checkpoint)? {
        let entry = entry?;
        largest = largest.max(Some((entry.metadata()?.len(), entry.path())));
    }
    let (length, path) = largest.ok_or("the checkpoint has no file")?;
    let file = fs::OpenOptions::new().read(true).write(true).open(path)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, length / 2)?;
    file.write_all_at(&[byte[0] ^ 1], length / 2)?;
    Ok(())
}

/// The job resumes from the newest whole checkpoint and says what it skipped; without one it does not start again
/// from step 1.
pub fn falls_back() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let checkpoints = folder.path().join("checkpoint");
    let (is_trained, text) = train(folder.path(), 6)?;
    assert!(is_trained, "{text}");
    flip_bit(&checkpoints.join("step-6"))?;
    fs::write(checkpoints.join("step-4/manifest.json"), "{}")?;

    let (is_resumed, text) = train(folder.path(), 8)?;
    assert!(is_resumed, "{text}");
    assert!(text.contains("corrupted"), "{text}");
    assert!(text.contains("resumed from step 2"), "{text}");
    assert!(checkpoints.join("step-8").is_dir(), "{text}");

    for entry in fs::read_dir(&checkpoints)? {
        let path = entry?.path();
        if path.is_dir() {
            flip_bit(&path)?;
        }
    }
    let (is_resumed, text) = train(folder.path(), 10)?;
    assert!(!is_resumed, "{text}");
    assert!(text.contains("no checkpoint of the job is whole"), "{text}");
    repair(&checkpoints)
}

/// `ckpt repair` lists what is damaged, and puts it aside if asked to.
fn repair(checkpoints: &Path) -> Result<(), Failed> {
    let repair = |keys: &[&str]| -> Result<(bool, String), Failed> {
        let mut command = Command::new(find("trainyard")?);
        let output = command
            .args(["ckpt", "repair"])
            .arg(checkpoints)
            .args(keys)
            .output()?;
        Ok((output.status.success(), describe(&output)))
    };
    let (is_whole, text) = repair(&[])?;
    assert!(!is_whole && text.contains("damaged: "), "{text}");
    let (is_repaired, text) = repair(&["--quarantine"])?;
    assert!(is_repaired, "{text}");
    assert!(checkpoints.join("quarantine/step-4").is_dir(), "{text}");
    assert!(!checkpoints.join("step-4").exists(), "{text}");
    Ok(())
}
