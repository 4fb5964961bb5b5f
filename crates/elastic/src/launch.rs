//! Doing it: starts the ranks, watches them, and sees the last of them off.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::phase::{Event, Phase, Word};
use crate::report::Outcome;
use crate::signals::Signals;
use crate::workers::{Workers, watch_error};
use crate::{Job, LaunchError};

/// Runs a job to its end: returns when no process of it is left.
///
/// Signals that end programs (SIGINT, SIGTERM, SIGHUP, SIGQUIT) are passed on to the ranks
/// meanwhile. The program that calls this must call [`worker::intercept`](crate::worker::intercept)
/// first in its `main`, unless the job names another trampoline.
pub fn launch(job: &Job) -> Result<Outcome, LaunchError> {
    let signals = Signals::watch().map_err(watch_error)?;
    let mut watch = Watch {
        signals,
        workers: Workers::start(job)?,
        grace: job.grace,
        phase: Phase::Running,
        interrupted: None,
    };
    watch.until_all_ended().map_err(watch_error)?;
    Ok(watch.workers.finish(watch.interrupted))
}

/// The watch over the ranks: what has been seen, and what has been done about it.
struct Watch {
    signals: Signals,
    workers: Workers,
    grace: Duration,
    phase: Phase,
    interrupted: Option<i32>,
}

impl Watch {
    fn until_all_ended(&mut self) -> io::Result<()> {
        while !self.workers.have_ended() {
            self.wait()?;
            let now = Instant::now();
            self.workers.look(&[], now);
            if self.workers.see_ends()? {
                self.react(Event::Failure, now);
            }
            for signal in self.signals.arrived() {
                self.interrupted = self.interrupted.or(Some(signal.as_raw()));
                self.react(Event::Signal(signal), now);
            }
            self.react(Event::Tick, now);
        }
        Ok(())
    }

    /// Until a rank ends, a signal arrives, the grace is over, or it is time to look.
    fn wait(&self) -> io::Result<()> {
        let mut fds = self.workers.poll_fds();
        fds.push(PollFd::from_borrowed_fd(
            self.signals.as_fd(),
            PollFlags::IN,
        ));
        let now = Instant::now();
        let look = self.workers.look_at();
        let look = look.map(|at| at.saturating_duration_since(now));
        let patience = self.phase.patience(now).into_iter().chain(look).min();
        let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
        match poll(&mut fds, patience.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn react(&mut self, event: Event, now: Instant) {
        let (phase, word) = self.phase.after(event, now, self.grace);
        self.phase = phase;
        match word {
            Some(Word::Dismiss) => self.workers.dismiss(),
            Some(Word::Signal(signal)) => self.workers.tell(signal),
            None => {}
        }
    }
}
