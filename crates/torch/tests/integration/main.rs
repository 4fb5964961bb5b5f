//! Integration tests of the libtorch bindings, in one process.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod autograd;
mod bytes;
mod fake;
mod kernel;
mod memory;
mod meta;
mod numbers;
mod operators;
mod saved;
mod storage;
