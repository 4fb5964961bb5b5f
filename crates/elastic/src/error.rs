//! Why a job could not be started or watched. A rank that fails is not an error of the launcher:
//! it is an [`Outcome`](crate::Outcome).

use std::io;
use std::path::PathBuf;

/// Why a job could not be started or watched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The job asks for no process at all.
    #[error("the number of processes is 0: start at least 1")]
    NoRanks,
    /// The program is neither a file nor on `PATH`.
    #[error("program `{program}` not found: it is neither an executable file nor on PATH")]
    ProgramNotFound {
        /// What was asked for.
        program: PathBuf,
    },
    /// The trampoline called [`launch`](crate::launch) instead of becoming a worker.
    #[error(
        "this program was started to become a worker but launches again: \
         call trainyard_elastic::worker::intercept() at the beginning of its main"
    )]
    NotATrampoline,
    /// The path of this program, through which workers are started, cannot be found out.
    #[error("cannot find the path of this program, through which workers start: {source}")]
    Trampoline {
        /// What the system said.
        source: io::Error,
    },
    /// No free port for the ranks to meet at.
    #[error("no free port on {address} for the ranks to meet at: {source}")]
    Port {
        /// The address that was tried.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// A log file cannot be made.
    #[error("cannot write the log {path}: {source}", path = path.display())]
    Log {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A rank's process cannot be started; those that were started have been ended.
    #[error("cannot start rank {rank} through {trampoline}: {source}", trampoline = trampoline.display())]
    Start {
        /// The rank.
        rank: usize,
        /// The program that was to become the worker.
        trampoline: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The ranks cannot be watched; they have been ended.
    #[error("cannot watch the ranks (pidfd needs Linux 5.3 or newer): {source}")]
    Watch {
        /// What the system said.
        source: io::Error,
    },
}
