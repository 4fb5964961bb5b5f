//! The launcher of one node: starts the ranks of a job, supervises them, and stops them together.
//!
//! A job on one node is N worker processes of one program. The launcher starts them with torchrun's environment and
//! prefixes every line of their output with the rank. When a rank fails, the launcher reports it, sends SIGTERM to
//! the others, and kills those that do not exit in time. It finds hung ranks by their heartbeats and kills them. No
//! process is left behind, even if the launcher itself is killed.
//!
//! ```no_run
//! use trainyard_launcher::{Job, launch, worker};
//!
//! fn main() -> std::process::ExitCode {
//!     // Workers start through this program itself: here they become PROGRAM.
//!     if let Some(code) = worker::intercept() {
//!         return code;
//!     }
//!     match launch(&Job::new("python3", 2).args(["-u", "train.py"])) {
//!         Ok(outcome) => {
//!             if let Some(report) = outcome.report() {
//!                 eprintln!("{report}");
//!             }
//!             std::process::ExitCode::from(outcome.exit_code())
//!         }
//!         Err(error) => {
//!             eprintln!("error: {error}");
//!             std::process::ExitCode::FAILURE
//!         }
//!     }
//! }
//! ```

pub mod broken_pipe;
pub mod color;
mod console_lines;
mod descendants;
mod environment;
mod error;
mod error_file;
mod final_exit;
mod idle;
mod job;
mod launch;
mod launch_served;
mod line_filters;
mod lines;
mod numa;
mod observer;
mod oom_kills;
pub mod openmp;
mod output;
mod program;
mod progress;
mod reaper;
mod report;
mod runtime_dir;
mod shutdown;
mod signals;
mod stream_selection;
mod template;
mod visible_gpus;
pub mod worker;
mod worker_process;
mod workers;

pub use environment::{MAX_WORLD_SIZE, MIN_WORLD_SIZE, Master, NODE_ADDR, environment};
pub use error::LaunchError;
pub use error_file::RecordedError;
pub use final_exit::{BAD_VALUES, REJECTED};
pub use job::{Console, Job, Output, RankRange};
pub use launch::launch;
pub use launch_served::{ServedJob, launch_served};
pub use line_filters::LineFilters;
pub use numa::NumaBinding;
pub use observer::{JobObserver, Observation};
pub use program::find_program;
pub use report::{ExitStatus, Outcome, WorkerExit, signal_name};
pub use runtime_dir::{JobInfo, running_jobs};
pub use signals::Signals;
pub use stream_selection::{InvalidSelection, StreamSelection};
pub use visible_gpus::{VISIBLE_DEVICES, num_gpus, visible_gpus};
pub use workers::Workers;
