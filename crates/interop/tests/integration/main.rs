//! The frameworks' own code parses what is written for them.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod frameworks;
