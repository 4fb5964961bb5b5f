//! Arbitrary bytes as a Hugging Face safetensors file: it is accepted or rejected without a panic, within the
//! memory bound.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use trainyard_checkpoint::{Checkpoint, store};
use trainyard_fuzz::bounded;

static DIR: LazyLock<TempDir> =
    LazyLock::new(|| tempfile::tempdir().expect("create a temporary directory"));

fuzz_target!(|bytes: &[u8]| {
    std::fs::write(DIR.path().join("model.safetensors"), bytes).expect("write the input");
    let store = store::open(DIR.path()).expect("open the store");
    bounded(bytes.len(), || {
        if let Ok(checkpoint) = Checkpoint::open(store, ".") {
            let _ = checkpoint.verify(|_| ());
        }
    });
});
