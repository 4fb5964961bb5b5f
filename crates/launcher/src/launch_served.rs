//! Launches parameter servers and their workers: a failure of one of them does not stop the others.
//!
//! The servers are one world, restarted as a whole; every worker is a world of its own, restarted alone. A worker without
//! restarts left is dropped, and the run goes on with the others. The run ends with its servers.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;

use crate::report::Outcome;
use crate::shutdown::{Event, Phase, ShutdownCommand};
use crate::signals::Signals;
use crate::workers::{Workers, watch_error};
use crate::{Job, LaunchError};

/// How long workers may run after the servers have ended: they have been told that there is no work left.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);

/// The processes of a run with parameter servers on this node.
#[derive(Clone, Debug)]
pub struct ServedJob {
    /// The servers; `None` if they run on other nodes.
    pub servers: Option<Job>,
    /// The workers, each a world of its own.
    pub workers: Vec<Job>,
}

/// Runs servers and workers to their end. Returns the outcome of the servers or, if all workers are lost, of the last of
/// them.
pub fn launch_served(job: &ServedJob) -> Result<Outcome, LaunchError> {
    let mut signals = Signals::watch(&[]).map_err(watch_error)?;
    let mut run = Run::start(job, &signals)?;
    while run.members().any(Member::is_running) {
        run.wait(&signals).map_err(watch_error)?;
        let now = Instant::now();
        for signal in signals.pending() {
            run.interrupt(signal, now);
        }
        run.advance(&signals, now)?;
    }
    Ok(run.outcome())
}

/// Servers or a worker: the processes that are restarted together.
struct Member {
    name: String,
    job: Job,
    phase: Phase,
    /// Whether a failure leads to a restart, if the job has restarts left.
    may_restart: bool,
    /// `None` when they have exited for the last time.
    processes: Option<Workers>,
    outcome: Option<Outcome>,
}

/// The state of a run.
struct Run {
    servers: Option<Member>,
    workers: Vec<Member>,
    /// Whether the servers were stopped because all workers were lost.
    is_abandoned: bool,
    interrupted_by: Option<i32>,
}

impl Run {
    fn start(job: &ServedJob, signals: &Signals) -> Result<Run, LaunchError> {
        let servers = job.servers.as_ref();
        let servers = servers.map(|job| Member::start("servers".to_owned(), job, signals));
        let workers = job.workers.iter().enumerate();
        let workers =
            workers.map(|(index, job)| Member::start(format!("worker {index}"), job, signals));
        Ok(Run {
            servers: servers.transpose()?,
            workers: workers.collect::<Result<_, _>>()?,
            is_abandoned: false,
            interrupted_by: None,
        })
    }

    fn members(&self) -> impl Iterator<Item = &Member> {
        self.servers.iter().chain(&self.workers)
    }

    /// Waits until a process exits, a signal arrives, or a timer is due.
    fn wait(&self, signals: &Signals) -> io::Result<()> {
        let now = Instant::now();
        let mut fds = vec![PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        let mut timers = Vec::new();
        for member in self.members() {
            let Some(processes) = &member.processes else {
                continue;
            };
            fds.extend(processes.poll_fds());
            let next_poll = processes.next_poll();
            timers.extend(next_poll.map(|at| at.saturating_duration_since(now)));
            timers.extend(member.phase.timeout(now));
        }
        let timeout = timers.into_iter().min();
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Forwards a signal: to the servers, which save while workers go on, or to all workers if the servers are elsewhere.
    fn interrupt(&mut self, signal: Signal, now: Instant) {
        self.interrupted_by = self.interrupted_by.or(Some(signal.as_raw()));
        let servers = self.servers.as_mut().filter(|servers| servers.is_running());
        match servers {
            Some(servers) => servers.handle(Event::Signal(signal), now),
            None => {
                for worker in &mut self.workers {
                    worker.handle(Event::Signal(signal), now);
                }
            }
        }
    }

    /// Notices who has exited, and restarts or ends members.
    fn advance(&mut self, signals: &Signals, now: Instant) -> Result<(), LaunchError> {
        let interrupted_by = self.interrupted_by;
        for worker in &mut self.workers {
            worker.advance(signals, now, interrupted_by)?;
        }
        let Some(servers) = &mut self.servers else {
            return Ok(());
        };
        let were_running = servers.is_running();
        servers.advance(signals, now, interrupted_by)?;
        if were_running && !servers.is_running() {
            let has_succeeded = servers.has_succeeded();
            for worker in &mut self.workers {
                worker.end(has_succeeded, now);
            }
        }
        let is_lost = |worker: &Member| !worker.is_running() && !worker.has_succeeded();
        if !self.is_abandoned && servers.is_running() && self.workers.iter().all(is_lost) {
            self.is_abandoned = true;
            servers.may_restart = false;
            servers.handle(Event::Failure, now);
        }
        Ok(())
    }

    fn outcome(mut self) -> Outcome {
        let decisive = self.servers.take().filter(|_| !self.is_abandoned);
        let decisive = decisive.or_else(|| {
            let succeeded = self.workers.iter().position(Member::has_succeeded);
            let last = self.workers.len().checked_sub(1);
            Some(self.workers.swap_remove(succeeded.or(last)?))
        });
        let outcome = decisive.and_then(|member| member.outcome);
        outcome.unwrap_or_else(|| Outcome::new(Vec::new(), self.interrupted_by))
    }
}

impl Member {
    fn start(name: String, job: &Job, signals: &Signals) -> Result<Member, LaunchError> {
        Ok(Member {
            name,
            job: job.clone(),
            phase: Phase::Running,
            may_restart: true,
            processes: Some(Workers::start(job, signals)?),
            outcome: None,
        })
    }

    fn is_running(&self) -> bool {
        self.processes.is_some()
    }

    fn has_succeeded(&self) -> bool {
        self.outcome.as_ref().is_some_and(Outcome::is_success)
    }

    /// Notices what has happened to the processes; restarts them if they have failed and may be restarted.
    fn advance(
        &mut self,
        signals: &Signals,
        now: Instant,
        interrupted_by: Option<i32>,
    ) -> Result<(), LaunchError> {
        let Some(processes) = &mut self.processes else {
            return Ok(());
        };
        processes.poll(&[], now);
        let was_running = self.phase == Phase::Running;
        if processes.reap_exited().map_err(watch_error)? {
            self.handle(Event::Failure, now);
        }
        self.handle(Event::Tick, now);
        let Some(processes) = self.processes.take_if(|processes| processes.all_exited()) else {
            return Ok(());
        };
        let outcome = processes.finish(interrupted_by);
        // A member that is being stopped is not restarted, unless its own failure is why.
        let may_restart = self.job.may_restart(&outcome) && self.may_restart;
        if may_restart {
            return self.restart(&outcome, signals);
        }
        if let Some(report) = outcome.report().filter(|_| was_running) {
            eprintln!("warning: {}: {report}", self.name);
        }
        self.outcome = Some(outcome);
        Ok(())
    }

    fn restart(&mut self, outcome: &Outcome, signals: &Signals) -> Result<(), LaunchError> {
        let report = outcome.report().unwrap_or_default();
        self.job.restart_count += 1;
        eprintln!(
            "warning: {}: {report}\nrestarting: restart {} of {}",
            self.name, self.job.restart_count, self.job.max_restarts
        );
        self.job.faults.push(report);
        self.phase = Phase::Running;
        self.processes = Some(Workers::start(&self.job, signals)?);
        Ok(())
    }

    /// Ends a worker whose servers have ended: it has been told that there is no work left, or there will never be any.
    fn end(&mut self, has_succeeded: bool, now: Instant) {
        self.may_restart = false;
        if has_succeeded {
            self.phase = Phase::Stopping(now + LEAVE_TIMEOUT);
        } else {
            self.handle(Event::Failure, now);
        }
    }

    fn handle(&mut self, event: Event, now: Instant) {
        let (phase, command) = self.phase.after(event, now, self.job.grace);
        self.phase = phase;
        let Some(processes) = &mut self.processes else {
            return;
        };
        match command {
            Some(ShutdownCommand::Abort) => processes.abort(),
            Some(ShutdownCommand::Signal(signal)) => processes.signal(signal),
            None => {}
        }
    }
}
