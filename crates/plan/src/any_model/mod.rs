//! Plans for any model.
//!
//! Formulas describe decoders only. For every other model the planner runs the training code itself: a dry run of each
//! candidate counts its memory, its kernels and its communication on one rank, and the figures of the cluster and its
//! calibration turn the counts into seconds. This module decides which candidates to try and what they cost; its
//! caller executes the dry runs.

mod candidate;
mod kernel;
mod price;
mod search;

pub use candidate::{Candidate, Layout, is_chosen, layouts};
pub use price::RankRun;
pub use search::{AnyModelPlan, AnyModelRequest, Outcome, best_of_layout};
