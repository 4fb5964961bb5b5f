//! Arbitrary bytes as the requests of a client of the workers' store, after its greeting: no panic, and memory in
//! proportion to what the client sends.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tokio::runtime::{Builder, Runtime};
use trainyard_fuzz::bounded;

const GREETING: &[u8] = b"\0\xce\xf7\x85\x3c";

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let mut builder = Builder::new_current_thread();
    builder.enable_time().build().expect("create a runtime")
});

fuzz_target!(|bytes: &[u8]| {
    let mut input = GREETING.to_vec();
    input.extend_from_slice(bytes);
    bounded(bytes.len(), || {
        let stream = tokio::io::join(&input[..], tokio::io::sink());
        let _ = RUNTIME.block_on(trainyard_elastic::serve_alone(stream));
    });
});
