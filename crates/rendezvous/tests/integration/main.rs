//! Tests of the decision function, its simulation, and both backends on real sockets.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod backends;
mod decisions;
mod simulation;
