//! Every strategy against one rank. Tests only.
//!
//! A test program here is also the program of its ranks: it starts itself again as 2, 3 or 4 real
//! processes that talk over Gloo on loopback, and one such world runs many cases.
//!
//! - [`Suite`] and [`main`]: cases, the worlds they run in, and a test per suite and world size.
//! - [`Rank`]: what a case sees: who it is, worlds to join, and a way to compare notes.
//! - [`training`]: a config trained to the end, with everything that can be compared.
//! - [`programs`]: the built programs, and what they print.

pub mod programs;
mod rank;
mod record;
mod suite;
pub mod training;

pub use rank::Rank;
pub use suite::{Case, Outcome, Suite, in_turn, main, within};
