//! Distributed checkpoints: saving the training state of all ranks and loading it.
//!
//! The layout of a tensor determines which shard of it a rank saves or loads, so a checkpoint that was
//! saved on one mesh can be loaded on any other.

mod load;
mod peers;
mod resume;
mod save;
mod save_plan;
mod staging;

pub use load::{latest, load, load_opened};
pub use peers::peers;
pub use resume::{ResumeSource, find_resume_source};
pub use save::{Destination, SaveStats, Saver};
