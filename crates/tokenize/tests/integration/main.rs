//! Integration tests of tokenization: text, JSON lines and Parquet.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod parquet;
mod prepare;
