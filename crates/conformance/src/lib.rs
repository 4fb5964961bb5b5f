//! Conformance tests: every strategy against one rank and against PyTorch.
//!
//! The test program is also the program of its ranks: it starts itself again as 2 to 8 real processes that
//! communicate over Gloo on loopback, or on GPUs if the node has them, real or simulated. One such world runs many
//! cases.
//!
//! - [`Suite`] and [`main`]: cases, the worlds in which they run, and one test per suite and world size.
//! - [`Rank`]: what a case gets: its rank, worlds to join, and a way to exchange values outside of collectives.
//! - [`training`]: trains a config to the end and keeps everything that can be compared.
//! - [`programs`]: the built programs and their output.

mod accelerator;
pub mod programs;
mod rank;
mod record;
mod suite;
pub mod training;

pub use rank::{Rank, device};
pub use suite::{Case, Outcome, Suite, Test, as_trials, full_only, is_full_run, main, within};
