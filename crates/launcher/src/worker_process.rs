//! The worker processes of a job. Dropping them kills them, so none can be left running by mistake.
//!
//! Every worker leads a session and its process group, and signals go to the group, so that processes a worker has started end with
//! it; in the end, those that have left the group are killed too. A worker that exited stays unreaped until its group has been killed: until then the kernel does not give its
//! pid to another process.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Stdio};

use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, pidfd_open,
    waitid,
};

use crate::descendants::{self, LAUNCH_ID, LaunchId};
use crate::reaper::Reaper;
use crate::report::ExitStatus;
use crate::template::substitute_local_rank;
use crate::{Job, LaunchError, worker};

/// The process of one local rank.
#[derive(Debug)]
pub(crate) struct WorkerProcess {
    child: Child,
    pidfd: OwnedFd,
}

/// The processes of all local ranks, by local rank, and the reaper that kills them if the launcher dies.
#[derive(Debug)]
pub(crate) struct WorkerProcesses {
    launch: LaunchId,
    reaper: Option<Reaper>,
    processes: Vec<WorkerProcess>,
}

impl WorkerProcesses {
    /// Starts the reaper, but no worker yet: the reaper must be there before the first worker.
    pub(crate) fn new(trampoline: &Path) -> Result<WorkerProcesses, LaunchError> {
        let failed = |source| LaunchError::Start {
            rank: 0,
            trampoline: trampoline.to_owned(),
            source,
        };
        let launch = LaunchId::random().map_err(failed)?;
        let reaper = Reaper::start(trampoline, &launch).map_err(failed)?;
        Ok(WorkerProcesses {
            launch,
            reaper: Some(reaper),
            processes: Vec::new(),
        })
    }

    /// Starts the worker of the next local rank; returns the pipes of its stdout and stderr.
    pub(crate) fn start(
        &mut self,
        job: &Job,
        program: &Path,
        trampoline: &Path,
        environment: Vec<(OsString, OsString)>,
    ) -> Result<[OwnedFd; 2], LaunchError> {
        let rank = self.processes.len();
        let failed = |source| LaunchError::Start {
            rank,
            trampoline: trampoline.to_owned(),
            source,
        };
        let arguments = job.args.iter();
        let arguments: Vec<OsString> = arguments
            .map(|argument| substitute_local_rank(argument, job.first_local_rank + rank))
            .collect();
        let mut child = worker::command(trampoline, program, &arguments)
            .envs(environment)
            .env(LAUNCH_ID, self.launch.as_str())
            .stdin(Stdio::inherit())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        if let Some(reaper) = &mut self.reaper {
            reaper.register(Pid::from_child(&child));
        }
        let pipes = child.stdout.take().zip(child.stderr.take());
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => self.processes.push(WorkerProcess { child, pidfd }),
            Err(errno) => {
                kill_group(&mut child);
                let source = errno.into();
                return Err(LaunchError::Watch { source });
            }
        }
        match pipes {
            Some((stdout, stderr)) => Ok([stdout.into(), stderr.into()]),
            None => Err(failed(io::ErrorKind::BrokenPipe.into())),
        }
    }

    pub(crate) fn by_local_rank(&self) -> &[WorkerProcess] {
        &self.processes
    }

    /// Kills whatever is left in the workers' process groups, and reaps the workers.
    pub(crate) fn kill_all(&mut self) {
        for process in &self.processes {
            process.signal(Signal::KILL);
        }
        if !self.processes.is_empty() {
            descendants::kill(&self.launch);
        }
        // After the last group was killed, and before the first pid becomes available to other processes.
        if let Some(reaper) = self.reaper.take() {
            reaper.shutdown();
        }
        for mut process in self.processes.drain(..) {
            let _ = process.child.wait();
        }
    }
}

impl Drop for WorkerProcesses {
    fn drop(&mut self) {
        self.kill_all();
    }
}

impl WorkerProcess {
    /// The pid of the worker, which is also the id of its process group.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// How the worker exited, or `None` while it runs; does not reap it.
    pub(crate) fn exit_status(&self) -> io::Result<Option<ExitStatus>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let status = rustix::io::retry_on_intr(|| waitid(WaitId::Pid(self.pid()), options))?;
        Ok(status.and_then(|status| {
            let code = status.exit_status().map(ExitStatus::Exited);
            code.or_else(|| status.terminating_signal().map(ExitStatus::Signaled))
        }))
    }

    /// Sends a signal to the worker and to all processes of its group. Errors do not matter: the group may be empty.
    pub(crate) fn signal(&self, signal: Signal) {
        signal_group(self.pid(), signal);
    }
}

/// Signals a worker and its process group. A trampoline that has just started leads no group yet.
fn signal_group(pid: Pid, signal: Signal) {
    if kill_process_group(pid, signal) == Err(Errno::SRCH) {
        let _ = kill_process(pid, signal);
    }
}

impl AsFd for WorkerProcess {
    /// Becomes readable when the process exits.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

fn kill_group(child: &mut Child) {
    signal_group(Pid::from_child(child), Signal::KILL);
    let _ = child.wait();
}
