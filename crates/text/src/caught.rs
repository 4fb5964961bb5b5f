//! A panic of the `parquet` crate as an error.

use std::panic::{AssertUnwindSafe, catch_unwind};

use parquet::errors::Result;

/// Runs a call into the crate. It indexes by what it reads, and panics where a damaged page lies; a user
/// gets an error that names the file instead. What was borrowed is not used again after an error.
pub(crate) fn caught<T>(call: impl FnOnce() -> Result<T>) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(_) => Err("it is damaged".into()),
    }
}
