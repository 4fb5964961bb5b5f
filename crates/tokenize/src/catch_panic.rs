//! Turns panics of the `parquet` crate into errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

use parquet::errors::Result;

/// Calls into the `parquet` crate. It trusts the indices that it reads and panics on a corrupted page; this
/// returns an error instead, to which the caller adds the name of the file. After an error the caller must
/// not use the borrowed values again.
pub(crate) fn catch_panic<T>(call: impl FnOnce() -> Result<T>) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(_) => Err("the file is corrupted".into()),
    }
}
