//! The planner: formulas, search, reports, and published and measured runs.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod expected;
mod frameworks;
mod golden;
mod measured;
mod pipeline;
mod published;
mod report;
mod runs;
mod search;
mod time;
