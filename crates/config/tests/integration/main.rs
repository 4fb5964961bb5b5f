//! Config files: those the project ships, and hostile ones.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod hostile;
mod shipped;
