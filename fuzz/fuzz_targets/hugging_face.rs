//! Arbitrary bytes as the `config.json` of a Hugging Face model, and as the index of its weights beside one
//! valid file of weights: they are accepted or rejected without a panic.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use trainyard_arch::DecoderConfig;
use trainyard_checkpoint::{Checkpoint, store};
use trainyard_fuzz::bounded;

const HEADER: &[u8] = br#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;

static DIR: LazyLock<TempDir> = LazyLock::new(|| {
    let dir = tempfile::tempdir().expect("create a temporary directory");
    let length = (HEADER.len() as u64).to_le_bytes();
    let weights = [&length, HEADER, &[0; 8]].concat();
    std::fs::write(dir.path().join("model-00001-of-00001.safetensors"), weights)
        .expect("write the weights");
    dir
});

fuzz_target!(|bytes: &[u8]| {
    let dir = DIR.path();
    std::fs::write(dir.join("model.safetensors.index.json"), bytes).expect("write the index");
    bounded(bytes.len(), || {
        if let Ok(text) = str::from_utf8(bytes)
            && let Ok(decoder) = DecoderConfig::from_hugging_face(text)
        {
            let again = decoder.to_hugging_face().expect("its own family has it");
            DecoderConfig::from_hugging_face(&again.to_string()).expect("the config round-trips");
        }
        if let Ok(checkpoint) = Checkpoint::open(store::open(dir).expect("open the store"), ".") {
            let _ = checkpoint.verify(|_| ());
        }
    });
});
