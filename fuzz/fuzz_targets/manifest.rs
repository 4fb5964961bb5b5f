//! Arbitrary bytes as a manifest: it is accepted or rejected without a panic. To reach the code behind the
//! digest check, every input is also tried with a valid header line.
#![no_main]

use libfuzzer_sys::fuzz_target;
use trainyard_checkpoint::{Digest, FORMAT_VERSION, Manifest};
use trainyard_fuzz::bounded;

fuzz_target!(|bytes: &[u8]| {
    bounded(bytes.len(), || {
        let _ = Manifest::decode("fuzz", bytes);
    });
    let header = format!(
        "trainyard-checkpoint {FORMAT_VERSION} {}\n",
        Digest::of(bytes)
    );
    let mut with_header = header.into_bytes();
    with_header.extend_from_slice(bytes);
    let mut decoded = None;
    bounded(with_header.len(), || {
        decoded = Manifest::decode("fuzz", &with_header).ok()
    });
    if let Some(manifest) = decoded {
        let again = manifest.encode().expect("a decoded manifest encodes");
        let again = Manifest::decode("fuzz", &again).expect("the manifest round-trips");
        assert_eq!(again.tensors, manifest.tensors);
    }
});
