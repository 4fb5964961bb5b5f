//! A job evaluates its model on data of its own.

use std::fs;

use libtest_mimic::Failed;
use serde_json::Value;
use tempfile::TempDir;
use trainyard_conformance::programs::{describe, run};
use trainyard_data::write_tokens;

use super::train::train_command;

const KEYS: &str = "--training.steps 4 --training.seq_len 16 --lr_scheduler.warmup_steps 1 \
                    --training.dataset tokens --validation.enable true --validation.freq 2 --validation.steps 1 \
                    --metrics.enable_tensorboard true --checkpoint.enable true --checkpoint.interval 2";

/// Validation data is that of training if nothing else is set, and its loss goes to every sink.
pub fn falls_back_to_training_data() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let tokens = folder.path().join("tokens.bin");
    write_tokens(&tokens, &(0..4096).map(|i| i % 250).collect::<Vec<u32>>())?;
    let output = run(train_command("llama-tiny", 2, KEYS)?
        .arg("--job.dump_folder")
        .arg(folder.path())
        .arg("--training.dataset_path")
        .arg(&tokens))?;
    let output = describe(&output);
    let text = fs::read_to_string(folder.path().join("metrics.jsonl"))?;
    let mut losses = Vec::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line)?;
        if let Some(loss) = line["validation_loss"].as_f64() {
            losses.push((line["step"].as_u64(), loss));
        }
    }
    assert_eq!(losses.len(), 2, "{text}");
    for (step, loss) in losses {
        assert!(step.is_some() && loss.is_finite(), "{text}");
        assert!(
            output.contains(&format!("validation loss: {loss:8.5}")),
            "{output}"
        );
    }
    let events = fs::read_dir(folder.path().join("tb"))?
        .next()
        .ok_or("no TensorBoard file")??;
    let events = String::from_utf8_lossy(&fs::read(events.path())?).into_owned();
    assert!(events.contains("validation_metrics/loss"), "{events}");
    Ok(())
}

/// A wrong path of the validation data is found before the first step.
pub fn missing_data_is_found_at_the_start() -> Result<(), Failed> {
    let folder = TempDir::new()?;
    let keys = "--training.steps 4 --lr_scheduler.warmup_steps 1 --validation.enable true --validation.freq 2 \
                --validation.dataset tokens --validation.dataset_path /nowhere/tokens.bin";
    let output = train_command("llama-tiny", 2, keys)?
        .arg("--job.dump_folder")
        .arg(folder.path())
        .output()?;
    let text = describe(&output);
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("/nowhere/tokens.bin"), "{text}");
    assert!(
        !folder.path().join("metrics.jsonl").exists(),
        "a step was taken: {text}"
    );
    Ok(())
}
