//! Errors of the launcher. A rank that fails is not one of them: it is part of the [`Outcome`](crate::Outcome).

use std::io;
use std::path::PathBuf;

/// Why the launcher cannot start or supervise a job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The job has zero processes.
    #[error("the number of processes per node is 0: it must be at least 1")]
    NoRanks,
    /// The program is neither a file nor on `PATH`.
    #[error("program `{program}` not found: it is neither an executable file nor on PATH")]
    ProgramNotFound {
        /// The requested program.
        program: PathBuf,
    },
    /// The trampoline called [`launch`](crate::launch) instead of becoming a worker.
    #[error(
        "this process was started as a worker, but it launches a job: \
         call trainyard_launcher::worker::intercept() at the beginning of main"
    )]
    NotATrampoline,
    /// `CUDA_VISIBLE_DEVICES` has fewer entries than there are ranks.
    #[error(
        "--virtual-local-rank: CUDA_VISIBLE_DEVICES has no entry for local rank {local_rank}; name as many GPUs as there are ranks"
    )]
    NoVisibleGpu {
        /// The local rank.
        local_rank: usize,
    },
    /// A rank cannot be bound to the processors near its GPU.
    #[error("--numa-binding: cannot find the processors for local rank {local_rank}: {source}")]
    Numa {
        /// The local rank.
        local_rank: usize,
        /// What is missing.
        source: io::Error,
    },
    /// The path of this program, which also starts the workers, is not known.
    #[error("cannot determine the path of this program, which starts the workers: {source}")]
    Trampoline {
        /// The error of the operating system.
        source: io::Error,
    },
    /// There is no free port for `MASTER_PORT`.
    #[error("cannot find a free port on {address} for MASTER_PORT: {source}")]
    Port {
        /// The address (`MASTER_ADDR`).
        address: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The launcher cannot create a log file.
    #[error("cannot create the log file {path}: {source}", path = path.display())]
    Log {
        /// The log file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The launcher cannot start the process of a rank. It has killed those it had started.
    #[error("cannot start rank {rank} through {trampoline}: {source}", trampoline = trampoline.display())]
    Start {
        /// The rank.
        rank: usize,
        /// The program through which workers start.
        trampoline: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The launcher cannot supervise the ranks. It has killed them.
    #[error("cannot supervise the ranks (pidfd needs Linux 5.3 or newer): {source}")]
    Watch {
        /// The error of the operating system.
        source: io::Error,
    },
}
