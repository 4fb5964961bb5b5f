//! Offload to files: correctness, full disks, corruption and memory bounds.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod offload;
mod staging_bound;
