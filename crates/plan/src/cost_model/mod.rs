//! A cost model from measurements of a node, and the step time it predicts for the real code.
//!
//! A cluster's data sheet estimates strategies on hardware that is not at hand. If the node is available, there is
//! a more accurate way: run the model's operators and every collective a few times, then predict the dry run of a
//! strategy operator by operator from those measurements. The dry run executes the training code itself, so nothing
//! is left out or counted twice.

mod linear;
mod predict;
mod profile;
mod sync_points;

pub use predict::{CollectiveCalls, DryRun, StepBreakdown, predict, predict_pipeline};
pub(crate) use predict::{is_of_optimizer, pipeline_bubble};
pub use profile::{NodeProfile, OperatorCost, ProfileError, ProfiledSteps};
pub use sync_points::{CommSample, StragglerWait};
