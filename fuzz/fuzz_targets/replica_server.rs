//! Arbitrary bytes as the messages of a client of a replica server: no panic, and memory within its capacity.
#![no_main]

use libfuzzer_sys::fuzz_target;
use trainyard_fuzz::bounded;
use trainyard_peer_checkpoint::replies;

const CAPACITY: u64 = 1 << 20;

/// Splits the input into messages, each after its length in one byte.
fn messages(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut messages = Vec::new();
    while let Some((&length, rest)) = bytes.split_first() {
        let (message, rest) = rest.split_at(rest.len().min(length.into()));
        messages.push(message);
        bytes = rest;
    }
    messages
}

fuzz_target!(|bytes: &[u8]| {
    let messages = messages(bytes);
    bounded(bytes.len(), || {
        for reply in replies(messages.into_iter(), CAPACITY) {
            assert!(!reply.is_empty());
        }
    });
});
