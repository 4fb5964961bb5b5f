//! Reports, and what the planner recommends.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod expected;
mod report;
mod sites;
