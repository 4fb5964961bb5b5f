//! Checkpoints of other format versions are rejected with an error that names both versions.

use std::fs;
use std::path::Path;

use trainyard_checkpoint::{
    Checkpoint, CheckpointError, FORMAT_VERSION, latest, latest_complete, step_dir, store,
};

/// A checkpoint of version 2 that the last build of that version wrote, not this test.
const VERSION_2: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/version-2");

/// Opens the newest checkpoint of `dir`, and returns the error's message and the version it found.
fn rejected_version(dir: &Path) -> (u64, String) {
    let store = store::open(dir).unwrap();
    let newest = latest(&*store)
        .unwrap()
        .expect("the checkpoint counts as complete");
    match Checkpoint::open(store, &newest).unwrap_err() {
        error @ CheckpointError::Version {
            found, supported, ..
        } => {
            assert_eq!(supported, FORMAT_VERSION);
            (found, error.to_string())
        }
        other => panic!("{other}"),
    }
}

fn assert_names_versions(message: &str, found: u64) {
    let (found, supported) = (
        format!("format version {found} is not supported"),
        format!("reads and writes version {FORMAT_VERSION}"),
    );
    assert!(message.contains(&found), "{message}");
    assert!(message.contains(&supported), "{message}");
}

#[test]
fn a_version_2_checkpoint_of_the_last_such_build_is_rejected() {
    let (found, message) = rejected_version(Path::new(VERSION_2));
    assert_eq!(found, 2);
    assert_names_versions(&message, 2);
    assert!(message.contains("step-2/manifest.json"), "{message}");
    assert!(message.contains("trainyard ckpt convert"), "{message}");
}

#[test]
fn a_store_that_can_lose_files_skips_version_2() {
    let store = store::open(Path::new(VERSION_2)).unwrap();
    assert!(latest_complete(&store).unwrap().is_none());
}

/// Version 1 had no manifest: it must not load as Hugging Face weights, which have the same file name.
#[test]
fn version_1_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let step = dir.path().join(step_dir(7));
    fs::create_dir(&step).unwrap();
    let views = [("w", [0u8; 8])];
    let views = views.iter().map(|(name, bytes)| {
        let dtype = safetensors::Dtype::F32;
        let view = safetensors::tensor::TensorView::new(dtype, vec![2], bytes);
        (name.to_string(), view.unwrap())
    });
    for file in ["model.safetensors", "optimizer.safetensors"] {
        safetensors::serialize_to_file(views.clone(), None, &step.join(file)).unwrap();
    }
    let state = r#"{"version": 1, "step": 7, "samples_seen": 56, "seed": 3, "world_size": 2, "config": ""}"#;
    fs::write(step.join("state.json"), state).unwrap();

    let (found, message) = rejected_version(dir.path());
    assert_eq!(found, 1);
    assert_names_versions(&message, 1);
    assert!(message.contains("trainyard ckpt convert"), "{message}");
}

#[test]
fn later_versions_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let step = dir.path().join(step_dir(1));
    fs::create_dir(&step).unwrap();
    let digest = "0".repeat(64);
    let later = FORMAT_VERSION + 1;
    let text = format!("trainyard-checkpoint {later} {digest}\n{{}}");
    fs::write(step.join("manifest.json"), text).unwrap();

    let (found, message) = rejected_version(dir.path());
    assert_eq!(found, later);
    assert_names_versions(&message, later);
    assert!(message.contains("newer build"), "{message}");
}
