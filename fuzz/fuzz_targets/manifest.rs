//! Any bytes as a manifest: refused or read, never a panic. What is behind the digest is reached by
//! giving every other input the right one.
#![no_main]

use libfuzzer_sys::fuzz_target;
use trainyard_checkpoint::{Digest, Manifest};
use trainyard_fuzz::bounded;

fuzz_target!(|bytes: &[u8]| {
    bounded(bytes.len(), || {
        let _ = Manifest::decode("fuzz", bytes);
    });
    let mut sealed = format!("trainyard-checkpoint 2 {}\n", Digest::of(bytes)).into_bytes();
    sealed.extend_from_slice(bytes);
    let mut read = None;
    bounded(sealed.len(), || {
        read = Manifest::decode("fuzz", &sealed).ok()
    });
    if let Some(manifest) = read {
        let again = manifest.encode().expect("what was read can be written");
        let again = Manifest::decode("fuzz", &again).expect("and read again");
        assert_eq!(again.tensors, manifest.tensors);
    }
});
