//! Launches a job without a rendezvous: starts the ranks, supervises them, and waits until all have exited.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::report::Outcome;
use crate::shutdown::{Event, Phase, ShutdownCommand};
use crate::signals::Signals;
use crate::workers::{Workers, watch_error};
use crate::{Job, LaunchError};

/// Runs a job to its end: returns when all of its processes have exited.
///
/// Meanwhile the launcher forwards SIGINT, SIGTERM, SIGHUP and SIGQUIT to the ranks. The calling program must call
/// [`worker::intercept`](crate::worker::intercept) first in its `main`, unless the job names another trampoline.
pub fn launch(job: &Job) -> Result<Outcome, LaunchError> {
    let signals = Signals::watch(&job.signals).map_err(watch_error)?;
    let mut supervisor = Supervisor {
        workers: Workers::start(job, &signals)?,
        signals,
        grace: job.grace,
        phase: Phase::Running,
        interrupted_by: None,
    };
    supervisor.run().map_err(watch_error)?;
    Ok(supervisor.workers.finish(supervisor.interrupted_by))
}

struct Supervisor {
    signals: Signals,
    workers: Workers,
    grace: Duration,
    phase: Phase,
    interrupted_by: Option<i32>,
}

impl Supervisor {
    fn run(&mut self) -> io::Result<()> {
        while !self.workers.all_exited() {
            self.wait()?;
            let now = Instant::now();
            self.workers.poll(&[], now);
            if self.workers.reap_exited()? {
                self.handle(Event::Failure, now);
            }
            for signal in self.signals.pending() {
                self.interrupted_by = self.interrupted_by.or(Some(signal.as_raw()));
                self.handle(Event::Signal(signal), now);
            }
            self.handle(Event::Tick, now);
        }
        Ok(())
    }

    /// Waits until a rank exits, a signal arrives, the grace period ends, or heartbeats are due.
    fn wait(&self) -> io::Result<()> {
        let mut fds = self.workers.poll_fds();
        fds.push(PollFd::from_borrowed_fd(
            self.signals.as_fd(),
            PollFlags::IN,
        ));
        let now = Instant::now();
        let next_poll = self.workers.next_poll();
        let next_poll = next_poll.map(|at| at.saturating_duration_since(now));
        let timeout = self.phase.timeout(now).into_iter().chain(next_poll).min();
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn handle(&mut self, event: Event, now: Instant) {
        let (phase, command) = self.phase.after(event, now, self.grace);
        self.phase = phase;
        match command {
            Some(ShutdownCommand::Abort) => self.workers.abort(),
            Some(ShutdownCommand::Signal(signal)) => self.workers.signal(signal),
            None => {}
        }
    }
}
