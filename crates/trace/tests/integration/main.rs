//! Integration tests of the ledger and of its trace files and summaries.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod chrome;
mod ledger;
mod pytorch;
mod summary;
