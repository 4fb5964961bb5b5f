//! The trampoline: how a process becomes a worker that cannot outlive its launcher.
//!
//! The launcher does not start PROGRAM but a trampoline (its own program, as the hidden
//! subcommand `__worker`), which asks the kernel to be killed when the launcher dies and then
//! turns into PROGRAM. That binding survives exec, so the worker has PROGRAM's name and the pid
//! the launcher knows, and costs one exec of a small program.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::keeper;

/// The hidden subcommand by which a program is asked to be a trampoline.
pub const SUBCOMMAND: &str = "__worker";

/// Set between the start of the trampoline and its exec, to notice a program that is none.
pub(crate) const MARK: &str = "TRAINYARD_TRAMPOLINE";

/// Why a trampoline did not become its program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The subcommand's arguments are not what the launcher passes.
    #[error(
        "`{SUBCOMMAND}` is for the launcher only: expected `{SUBCOMMAND} PARENT -- PROGRAM ARGS`"
    )]
    Usage,
    /// The launcher died before the worker was bound to it.
    #[error("the launcher (pid {parent}) is gone: not starting")]
    Orphaned {
        /// The launcher's pid.
        parent: i32,
    },
    /// The kernel refused the binding.
    #[error("cannot bind this process to the launcher: {source}")]
    Bind {
        /// What the system said.
        source: io::Error,
    },
    /// The program cannot be executed.
    #[error("cannot execute {program:?}: {source}")]
    Exec {
        /// The program.
        program: OsString,
        /// What the system said.
        source: io::Error,
    },
}

/// Plays the launcher's part when this process was started for it: to be called first in `main`
/// of a program that launches. Returns the code to exit with, or `None` in an ordinary start.
pub fn intercept() -> Option<ExitCode> {
    let mut args = std::env::args_os().skip(1);
    if args.next()? != SUBCOMMAND {
        return None;
    }
    let args: Vec<OsString> = args.collect();
    if args == [keeper::FLAG] {
        keeper::keep(io::stdin().lock());
        return Some(ExitCode::SUCCESS);
    }
    let Err(error) = become_worker(&args);
    eprintln!("error: {error}");
    // As shells have it: 127 not found, 126 found but not executable.
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

/// Turns this process into `program`, to be killed by the kernel when `parent` dies. Returns only
/// when that fails.
pub fn exec_after_binding_to_parent(
    parent: Pid,
    program: &OsStr,
    args: &[OsString],
) -> Result<Infallible, WorkerError> {
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|errno| WorkerError::Bind {
        source: errno.into(),
    })?;
    // A parent that died before the binding sends no signal any more.
    if getppid() != Some(parent) {
        return Err(WorkerError::Orphaned {
            parent: parent.as_raw_pid(),
        });
    }
    let source = Command::new(program).args(args).env_remove(MARK).exec();
    Err(WorkerError::Exec {
        program: program.to_owned(),
        source,
    })
}

/// The command that starts `program` through `trampoline`, bound to this process and at the head
/// of a process group of its own. The thread that spawns it must live as long as it: the kernel
/// counts the end of that thread as the death of the parent.
pub(crate) fn command(trampoline: &Path, program: &Path, args: &[OsString]) -> Command {
    let mut command = Command::new(trampoline);
    command
        .arg(SUBCOMMAND)
        .arg(std::process::id().to_string())
        .arg("--")
        .arg(program)
        .args(args)
        .env(MARK, "1")
        .process_group(0);
    command
}
