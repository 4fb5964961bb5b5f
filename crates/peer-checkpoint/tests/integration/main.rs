//! Integration tests, in one program.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod replication;
