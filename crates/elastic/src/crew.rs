//! The processes of a job, which cannot be forgotten: dropping them ends them.
//!
//! Every rank heads a process group, and signals go to the group, so that what a rank has started
//! ends with it. A rank that ended stays unreaped until its group is dealt with: as long as it is
//! there, its pid cannot come to mean somebody else.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Stdio};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, waitid,
};

use crate::keeper::Keeper;
use crate::report::How;
use crate::{Job, LaunchError, worker};

/// One rank's process.
#[derive(Debug)]
pub(crate) struct Member {
    child: Child,
    pidfd: OwnedFd,
}

/// All ranks, by rank, and the keeper that ends them when the launcher cannot.
#[derive(Debug)]
pub(crate) struct Crew {
    keeper: Option<Keeper>,
    members: Vec<Member>,
}

impl Crew {
    /// Nobody yet; the keeper is there first, so that there is no time without it.
    pub(crate) fn new(trampoline: &Path) -> Result<Crew, LaunchError> {
        let keeper = Keeper::start(trampoline).map_err(|source| LaunchError::Start {
            rank: 0,
            trampoline: trampoline.to_owned(),
            source,
        })?;
        Ok(Crew {
            keeper: Some(keeper),
            members: Vec::new(),
        })
    }

    /// Starts the next rank; gives the pipes of its stdout and stderr.
    pub(crate) fn start(
        &mut self,
        job: &Job,
        program: &Path,
        trampoline: &Path,
        environment: Vec<(OsString, OsString)>,
    ) -> Result<[OwnedFd; 2], LaunchError> {
        let rank = self.members.len();
        let failed = |source| LaunchError::Start {
            rank,
            trampoline: trampoline.to_owned(),
            source,
        };
        let mut child = worker::command(trampoline, program, &job.args)
            .envs(environment)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        if let Some(keeper) = &mut self.keeper {
            keeper.hold(Pid::from_child(&child));
        }
        let pipes = child.stdout.take().zip(child.stderr.take());
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => self.members.push(Member { child, pidfd }),
            Err(errno) => {
                end_group(&mut child);
                let source = errno.into();
                return Err(LaunchError::Watch { source });
            }
        }
        match pipes {
            Some((stdout, stderr)) => Ok([stdout.into(), stderr.into()]),
            None => Err(failed(io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// The ranks' processes, by rank.
    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    /// Ends whatever is left in the ranks' groups, and reaps.
    pub(crate) fn end(&mut self) {
        for member in &mut self.members {
            let _ = kill_process_group(member.pid(), Signal::KILL);
        }
        // After the last group was ended and before the first pid is free for others.
        if let Some(keeper) = self.keeper.take() {
            keeper.dismiss();
        }
        for mut member in self.members.drain(..) {
            let _ = member.child.wait();
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.end();
    }
}

impl Member {
    /// Its process, which is also the name of its group.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// How it ended, or `None` while it runs; leaves it unreaped.
    pub(crate) fn ended(&self) -> io::Result<Option<How>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let status = rustix::io::retry_on_intr(|| waitid(WaitId::Pid(self.pid()), options))?;
        Ok(status.and_then(|status| {
            let code = status.exit_status().map(How::Exited);
            code.or_else(|| status.terminating_signal().map(How::Killed))
        }))
    }

    /// Sends a signal to it and to all it has started. One that has just ended needs none.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.pid(), signal);
    }
}

impl AsFd for Member {
    /// Becomes readable when the process ends.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

fn end_group(child: &mut Child) {
    let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
    let _ = child.wait();
}
