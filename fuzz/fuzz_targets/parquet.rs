//! Arbitrary bytes as a Parquet file of text: it is accepted or rejected. The `parquet` crate panics on some
//! corrupted pages; our code must catch those panics, and any other panic is a finding.
#![no_main]

use std::sync::{LazyLock, Once};

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use trainyard_fuzz::bounded;
use trainyard_tokenize::row_groups;

static DIR: LazyLock<TempDir> =
    LazyLock::new(|| tempfile::tempdir().expect("create a temporary directory"));
static HOOK: Once = Once::new();

/// Replaces the fuzzer's panic hook, which aborts at every panic. Uncaught panics still end the process.
fn allow_caught_panics() {
    std::panic::set_hook(Box::new(|info| {
        let is_known = |location: &std::panic::Location| location.file().contains("/parquet-");
        if !info.location().is_some_and(is_known) {
            eprintln!("{info}");
        }
    }));
}

fuzz_target!(|bytes: &[u8]| {
    HOOK.call_once(allow_caught_panics);
    let path = DIR.path().join("in.parquet");
    std::fs::write(&path, bytes).expect("write the input");
    bounded(bytes.len(), || {
        for group in row_groups(&path, "text").into_iter().flatten() {
            let _ = group.for_each_document(&path, |_| Ok(()));
        }
    });
});
