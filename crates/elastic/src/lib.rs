//! Starting the ranks of a job, watching them, and ending them together.
//!
//! A job on one machine is N processes of one program. They start together with torchrun's
//! environment, their output comes out line by line with the rank in front, and they end
//! together: the first that fails is recorded and named first, the rest are told to end and then
//! made to. A rank that hangs is found by its pulse, and killed as if it had died. Whatever dies, the
//! launcher included, no process stays behind.
//!
//! ```no_run
//! use trainyard_elastic::{Job, launch, worker};
//!
//! fn main() -> std::process::ExitCode {
//!     // Workers are started through the program itself; this is where they turn into PROGRAM.
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

mod board;
mod crew;
mod environment;
mod error;
mod job;
mod keeper;
mod launch;
mod line;
mod output;
mod patience;
mod phase;
mod program;
mod report;
mod signals;
mod slow;
mod vigil;
pub mod worker;
mod workers;

pub use board::{Notice, notices};
pub use environment::{EPOCH, FULL_WORLD_SIZE, LEAST_WORLD_SIZE, Master, environment};
pub use error::LaunchError;
pub use job::{Console, Job, Output, Ranks};
pub use launch::launch;
pub use patience::{Blame, Patience};
pub use program::find_program;
pub use report::{End, How, Outcome};
pub use signals::Signals;
pub use slow::{Slow, slow};
pub use workers::Workers;
