//! The command `trainyard`, started as a user starts it.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod architecture;
mod engine;
mod foreign;
mod plan;
mod run;
