//! Any bytes as a safetensors file of Hugging Face's: refused or read, never a panic, and never more
//! memory than the file could need.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use trainyard_checkpoint::{Checkpoint, store};
use trainyard_fuzz::bounded;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(|bytes: &[u8]| {
    std::fs::write(FOLDER.path().join("model.safetensors"), bytes).expect("a file");
    let store = store::open(FOLDER.path()).expect("a path");
    bounded(bytes.len(), || {
        if let Ok(checkpoint) = Checkpoint::open(store, ".") {
            let _ = checkpoint.verify(|_| ());
        }
    });
});
