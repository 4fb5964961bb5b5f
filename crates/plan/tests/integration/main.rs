//! The planner: formulas, search, and published and measured runs.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod golden;
mod measured;
mod published;
mod runs;
mod search;
mod sites;
mod time;
