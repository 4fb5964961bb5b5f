//! The trampoline: starts a worker that cannot outlive its launcher.
//!
//! The launcher does not start PROGRAM directly. It starts a trampoline (its own program with the hidden subcommand
//! `__worker`), which requests a SIGKILL for the death of its parent (`PR_SET_PDEATHSIG`) and then executes PROGRAM.
//! The request survives exec, so the worker keeps the pid that the launcher knows, at the cost of one more exec.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, setsid};

use rustix::thread::{CpuSet, sched_setaffinity};

use crate::numa::parse_cpu_list;
use crate::reaper;

/// The hidden subcommand that makes a program act as trampoline.
pub const SUBCOMMAND: &str = "__worker";

/// Set from the start of the trampoline to its exec, to detect a program that does not call [`intercept`].
pub(crate) const MARK: &str = "TRAINYARD_TRAMPOLINE";

/// The processors that the worker may use, in the kernel's notation, if not all.
pub(crate) const CPUS: &str = "TRAINYARD_CPUS";

/// Why a trampoline could not execute its program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The subcommand's arguments are not what the launcher passes.
    #[error(
        "`{SUBCOMMAND}` is for the launcher's internal use: expected `{SUBCOMMAND} PARENT -- PROGRAM ARGS`"
    )]
    Usage,
    /// The launcher died before the worker could request the death signal.
    #[error("the launcher (pid {parent}) is dead: the worker does not start")]
    Orphaned {
        /// The launcher's pid.
        parent: i32,
    },
    /// The kernel rejected the request for a death signal or for a session.
    #[error("cannot separate the worker from its launcher: {source}")]
    Bind {
        /// The error of the operating system.
        source: io::Error,
    },
    /// The worker cannot be bound to the processors near its GPU.
    #[error("cannot bind the rank to processors: {source}")]
    Cpus {
        /// The error of the operating system.
        source: io::Error,
    },
    /// The program cannot be executed.
    #[error("cannot execute {program:?}: {source}")]
    Exec {
        /// The program.
        program: OsString,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Acts as trampoline or reaper if a launcher started this process as such. A program that launches jobs must call it
/// first in `main`. Returns the exit code, or `None` if the process was started normally.
pub fn intercept() -> Option<ExitCode> {
    let mut args = std::env::args_os().skip(1);
    if args.next()? != SUBCOMMAND {
        return None;
    }
    let args: Vec<OsString> = args.collect();
    if args == [reaper::FLAG] {
        reaper::run(io::stdin().lock());
        return Some(ExitCode::SUCCESS);
    }
    let Err(error) = become_worker(&args);
    eprintln!("error: {error}");
    // The exit codes of shells: 127 for not found, 126 for not executable.
    Some(ExitCode::from(match error {
        WorkerError::Exec { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
        _ => 126,
    }))
}

fn become_worker(args: &[OsString]) -> Result<Infallible, WorkerError> {
    let [parent, dashes, program, args @ ..] = args else {
        return Err(WorkerError::Usage);
    };
    let parent = parent.to_str().and_then(|parent| parent.parse().ok());
    match parent.and_then(Pid::from_raw) {
        Some(parent) if dashes == "--" => exec_after_binding_to_parent(parent, program, args),
        _ => Err(WorkerError::Usage),
    }
}

/// Executes `program` in this process, which the kernel kills when `parent` dies. Returns only on failure.
pub fn exec_after_binding_to_parent(
    parent: Pid,
    program: &OsStr,
    args: &[OsString],
) -> Result<Infallible, WorkerError> {
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|errno| WorkerError::Bind {
        source: errno.into(),
    })?;
    // A parent that died before the request sends no signal.
    if getppid() != Some(parent) {
        return Err(WorkerError::Orphaned {
            parent: parent.as_raw_pid(),
        });
    }
    // A session of its own, so that a rank that reads from the terminal is not stopped for being in the background.
    match setsid() {
        // It leads a group already.
        Ok(_) | Err(Errno::PERM) => {}
        Err(errno) => {
            return Err(WorkerError::Bind {
                source: errno.into(),
            });
        }
    }
    if let Some(cpus) = std::env::var_os(CPUS) {
        bind_to_cpus(&cpus).map_err(|source| WorkerError::Cpus { source })?;
    }
    let mut command = Command::new(program);
    let source = command.args(args).env_remove(MARK).env_remove(CPUS).exec();
    Err(WorkerError::Exec {
        program: program.to_owned(),
        source,
    })
}

/// Limits this process to some processors.
fn bind_to_cpus(list: &OsStr) -> io::Result<()> {
    let cpus = list.to_str().and_then(parse_cpu_list);
    let cpus = cpus.ok_or(io::ErrorKind::InvalidInput)?;
    let mut set = CpuSet::new();
    cpus.into_iter().for_each(|cpu| set.set(cpu));
    Ok(sched_setaffinity(None, &set)?)
}

/// The command that starts `program` through `trampoline`, in a new session and with a death signal for this
/// process. The thread that spawns it must outlive the worker: to the kernel, the end of that thread is the death of
/// the parent.
pub(crate) fn command(trampoline: &Path, program: &Path, args: &[OsString]) -> Command {
    let mut command = Command::new(trampoline);
    command
        .arg(SUBCOMMAND)
        .arg(std::process::id().to_string())
        .arg("--")
        .arg(program)
        .args(args)
        .env(MARK, "1");
    command
}
