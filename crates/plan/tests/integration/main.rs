//! The planner: formulas, search, and published and measured runs.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod generations;
mod golden;
mod measured;
mod papers;
mod published;
mod runs;
mod search;
mod sites;
mod time;
