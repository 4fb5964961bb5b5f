//! Integration tests of saving and loading: file systems, object stores, interruptions, old formats.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod bucket;
mod checkpoint;
mod killed;
mod object_store;
mod old_formats;
