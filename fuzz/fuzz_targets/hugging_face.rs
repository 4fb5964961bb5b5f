//! Any bytes as the `config.json` of a model of Hugging Face's, and as the index of its weights, beside
//! one file of weights that is right: refused or read, never a panic.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use trainyard_checkpoint::{Checkpoint, store};
use trainyard_config::ModelSpec;
use trainyard_fuzz::bounded;

const HEADER: &[u8] = br#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder");
    let length = (HEADER.len() as u64).to_le_bytes();
    let weights = [&length, HEADER, &[0; 8]].concat();
    std::fs::write(
        folder.path().join("model-00001-of-00001.safetensors"),
        weights,
    )
    .expect("a file");
    folder
});

fuzz_target!(|bytes: &[u8]| {
    let folder = FOLDER.path();
    std::fs::write(folder.join("model.safetensors.index.json"), bytes).expect("a file");
    bounded(bytes.len(), || {
        if let Ok(text) = str::from_utf8(bytes)
            && let Ok(shape) = ModelSpec::from_hugging_face(text)
        {
            let again = shape.to_hugging_face().expect("a decoder").to_string();
            ModelSpec::from_hugging_face(&again).expect("what was read can be written and read");
        }
        if let Ok(checkpoint) = Checkpoint::open(store::open(folder).expect("a path"), ".") {
            let _ = checkpoint.verify(|_| ());
        }
    });
});
