//! Any bytes as a Parquet file of text: refused or read. The `parquet` crate panics on some damaged pages;
//! those panics must be caught, and all others count.
#![no_main]

use std::sync::{LazyLock, Once};

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use trainyard_fuzz::bounded;
use trainyard_text::row_groups;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));
static HOOK: Once = Once::new();

/// The fuzzer's hook ends the process at every panic; without it, those that are not caught still do.
fn let_panics_be_caught() {
    std::panic::set_hook(Box::new(|info| {
        let is_known = |place: &std::panic::Location| place.file().contains("/parquet-");
        if !info.location().is_some_and(is_known) {
            eprintln!("{info}");
        }
    }));
}

fuzz_target!(|bytes: &[u8]| {
    HOOK.call_once(let_panics_be_caught);
    let path = FOLDER.path().join("in.parquet");
    std::fs::write(&path, bytes).expect("a file");
    bounded(bytes.len(), || {
        for group in row_groups(&path, "text").into_iter().flatten() {
            let _ = group.for_each_document(&path, |_| Ok(()));
        }
    });
});
