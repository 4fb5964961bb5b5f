//! The value guard: no job trains on values that are not finite.

use std::fs;
use std::path::Path;
use std::process::Output;

use libtest_mimic::Failed;
use serde_json::Value;
use tempfile::TempDir;
use trainyard_conformance::programs::describe;
use trainyard_launcher::BAD_VALUES;

use super::train::train_command;

const EXIT_CODE: i32 = BAD_VALUES as i32;

/// Trains eight steps of eight samples on two ranks; sample 37, of step 5 and rank 1, is bad.
fn train(folder: &Path, keys: &str) -> Result<Output, Failed> {
    let keys = format!(
        "--training.steps 8 --lr_scheduler.warmup_steps 1 --checkpoint.enable true --checkpoint.interval 2 \
         --checkpoint.keep_latest_k 0 {keys}"
    );
    let mut command = train_command("llama-tiny", 2, &keys)?;
    let output = command.arg("--job.dump_folder").arg(folder).output()?;
    Ok(output)
}

/// The steps and losses of metrics.jsonl.
fn losses(folder: &Path) -> Result<Vec<(u64, Option<f64>)>, Failed> {
    let text = fs::read_to_string(folder.join("metrics.jsonl"))?;
    let line = |line: &str| -> Result<_, Failed> {
        let line: Value = serde_json::from_str(line)?;
        Ok((
            line["step"].as_u64().ok_or("no step")?,
            line["loss"].as_f64(),
        ))
    };
    text.lines().map(line).collect()
}

fn checkpoints(folder: &Path) -> Result<Vec<String>, Failed> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder.join("checkpoint"))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.retain(|name| name.starts_with("step-"));
    names.sort();
    Ok(names)
}

/// The job ends, names what happened, is not restarted, and keeps its good checkpoints.
pub fn stops() -> Result<(), Failed> {
    for keys in [
        "--debug.bad_sample 37",
        "--debug.bad_sample 37 --parallelism.data_parallel_shard_degree 2",
        "--debug.bad_sample 37 --training.mixed_precision_param bfloat16",
    ] {
        let folder = TempDir::new()?;
        let output = train(folder.path(), keys)?;
        let text = describe(&output);
        assert_eq!(output.status.code(), Some(EXIT_CODE), "{keys}: {text}");
        assert!(
            text.contains("step 5: the loss of rank 1 is not finite, samples 32 to 39"),
            "{keys}: {text}"
        );
        assert_eq!(checkpoints(folder.path())?, ["step-2", "step-4"], "{text}");
    }
    Ok(())
}

/// A step that is computed again tells a transient fault from one of a rank and from one in the data.
pub fn reruns() -> Result<(), Failed> {
    for (keys, verdict) in [
        ("--debug.bad_rank 1 --debug.bad_step 3", "a transient fault"),
        (
            "--debug.bad_rank 1",
            "only data-parallel replica 1 has such values",
        ),
        (
            "--debug.bad_sample 37",
            "every replica has such values from share 1 of the batch",
        ),
        (
            "--debug.bad_sample 37 --parallelism.data_parallel_shard_degree 2",
            "every replica has such values from share 1 of the batch",
        ),
        (
            "--debug.bad_sample 17 --parallelism.tensor_parallel_degree 2",
            "there is no other replica",
        ),
    ] {
        let folder = TempDir::new()?;
        let output = train(folder.path(), &format!("{keys} --value_guard.rerun true"))?;
        let text = describe(&output);
        assert_eq!(output.status.code(), Some(EXIT_CODE), "{keys}: {text}");
        assert!(text.contains(verdict), "{keys}: {text}");
    }
    Ok(())
}

/// The job goes on without the update.
pub fn skips() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let output = train(
        folder.path(),
        "--debug.bad_sample 37 --value_guard.policy skip",
    )?;
    let text = describe(&output);
    assert!(output.status.success(), "{text}");
    let losses = losses(folder.path())?;
    let finite: Vec<u64> = losses
        .iter()
        .filter(|(_, loss)| loss.is_some())
        .map(|(step, _)| *step)
        .collect();
    assert_eq!(finite, [1, 2, 3, 4, 6, 7, 8], "{text}");
    assert!(losses[7].1 < losses[0].1, "it learns: {losses:?}");
    Ok(())
}

/// The job goes back to step 4 and trains on other samples instead, as a job that never saw the bad ones.
pub fn rolls_back() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let output = train(
        folder.path(),
        "--debug.bad_sample 37 --value_guard.policy rollback",
    )?;
    let text = describe(&output);
    assert!(output.status.success(), "{text}");
    let losses = losses(folder.path())?;
    let steps: Vec<u64> = losses.iter().map(|(step, _)| *step).collect();
    // Noticed in step 6.
    assert_eq!(steps, [1, 2, 3, 4, 5, 6, 5, 6, 7, 8], "{text}");
    let bad: Vec<u64> = losses
        .iter()
        .filter(|(_, loss)| loss.is_none())
        .map(|(step, _)| *step)
        .collect();
    assert_eq!(bad, [5], "{text}");
    // The first step that was repeated has the samples, and the parameters, of step 6 without the bad step.
    assert_eq!(losses[5].1, losses[6].1, "{losses:?}");
    Ok(())
}

/// A model that diverges ends the job when the budget is spent.
pub fn budget_ends_the_job() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let keys = "--optimizer.lr 1e30 --value_guard.policy skip --value_guard.max_incidents 3";
    let output = train(folder.path(), keys)?;
    let text = describe(&output);
    assert_eq!(output.status.code(), Some(EXIT_CODE), "{text}");
    Ok(())
}

/// A flipped bit in one replica ends the job and names the rank, before a checkpoint of it is saved.
pub fn drift() -> Result<(), Failed> {
    for target in ["parameter", "gradient", "state"] {
        let folder = TempDir::new()?;
        let keys = format!(
            "--training.steps 8 --lr_scheduler.warmup_steps 1 --checkpoint.enable true --checkpoint.interval 2 \
             --checkpoint.keep_latest_k 0 --training.local_batch_size 2 --debug.flip_bit {target} \
             --debug.flip_bit_step 5 --debug.flip_bit_rank 2"
        );
        let mut command = train_command("llama-tiny", 3, &keys)?;
        let output = command
            .arg("--job.dump_folder")
            .arg(folder.path())
            .output()?;
        let text = describe(&output);
        assert_eq!(output.status.code(), Some(EXIT_CODE), "{target}: {text}");
        let expected = "step 6: replicas differ on rank 2";
        assert!(text.contains(expected), "{target}: {text}");
        assert_eq!(checkpoints(folder.path())?, ["step-2", "step-4"], "{text}");
    }
    Ok(())
}

/// A job goes back to a checkpoint that its replicas agreed on, and ends as if nothing had happened.
pub fn drift_is_rolled_back() -> Result<(), Failed> {
    let (disturbed, undisturbed) = (TempDir::new()?, TempDir::new()?);
    let flip = "--debug.flip_bit parameter --debug.flip_bit_step 5 --value_guard.policy rollback";
    let mut last = Vec::new();
    for (folder, keys) in [(&disturbed, flip), (&undisturbed, "")] {
        let output = train(folder.path(), keys)?;
        assert!(output.status.success(), "{}", describe(&output));
        last.push(losses(folder.path())?.pop());
    }
    assert_eq!(last[0], last[1]);
    Ok(())
}
