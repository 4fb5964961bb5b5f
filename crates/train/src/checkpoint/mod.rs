//! Distributed checkpoints: saving the training state of all ranks and loading it.
//!
//! The layout of a tensor determines which shard of it a rank saves or loads, so a checkpoint that was
//! saved on one mesh can be loaded on any other.

mod destinations;
mod folder;
mod load;
mod peers;
mod report_keys;
mod resume;
mod resume_changes;
mod resume_job;
mod save;
mod save_plan;
mod staging;
mod visit;

pub(crate) use destinations::{memory, storage};
pub use folder::{load, save};
pub(crate) use load::broadcast_from_rank0;
pub use load::{agree_on_load, latest, load_opened, load_step};
pub use peers::peers;
pub use resume::{ResumeSource, SearchRange, find_resume_source};
pub(crate) use resume_job::{load_latest, resume};
pub use save::{Destination, SaveStats, Saver};
