//! Doing it: starts the ranks, watches them, and sees the last of them off.

use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;

use crate::crew::Crew;
use crate::output::{Source, Stream, pump};
use crate::phase::{Event, Phase};
use crate::report::{End, How, Outcome};
use crate::signals::Signals;
use crate::{Job, LaunchError, Master, environment, find_program, worker};

/// Runs a job to its end: returns when no process of it is left.
///
/// Signals that end programs (SIGINT, SIGTERM, SIGHUP, SIGQUIT) are passed on to the ranks
/// meanwhile. The program that calls this must call [`worker::intercept`] first in its `main`,
/// unless the job names another trampoline.
pub fn launch(job: &Job) -> Result<Outcome, LaunchError> {
    let started = Instant::now();
    let signals = Signals::watch().map_err(watch_error)?;
    let (crew, [stdout, stderr]) = start(job)?;
    let (stop, until_done) = pipe_with(PipeFlags::CLOEXEC).map_err(watch_error)?;
    thread::scope(|scope| {
        let stop = stop.as_fd();
        let stdout = scope.spawn(move || pump(Stream::Stdout, stdout, stop));
        let stderr = scope.spawn(move || pump(Stream::Stderr, stderr, stop));
        let mut watch = Watch::new(crew, signals, started, job);
        let watched = watch.until_all_ended();
        watch.crew.end();
        // What the ranks wrote is in the pipes now; the pumps carry that and stop.
        drop(until_done);
        let last_lines = stderr.join().unwrap_or_default();
        let _ = stdout.join();
        watched.map_err(watch_error)?;
        Ok(watch.outcome(last_lines))
    })
}

fn watch_error(error: impl Into<io::Error>) -> LaunchError {
    let source = error.into();
    LaunchError::Watch { source }
}

/// Starts every rank; gives the ways of their stdout and of their stderr.
fn start(job: &Job) -> Result<(Crew, [Vec<Source>; 2]), LaunchError> {
    if std::env::var_os(worker::MARK).is_some() {
        return Err(LaunchError::NotATrampoline);
    }
    if job.nproc == 0 {
        return Err(LaunchError::NoRanks);
    }
    let program = program(job)?;
    let trampoline = trampoline(job)?;
    let master = master(job)?;
    let mut crew = Crew::new(&trampoline)?;
    let (mut stdouts, mut stderrs) = (Vec::new(), Vec::new());
    for rank in 0..job.nproc {
        let is_set = |name: &str| std::env::var_os(name).is_some();
        let environment = environment(job, rank, &master, is_set);
        let [stdout, stderr] = crew.start(job, &program, &trampoline, environment)?;
        stdouts.push(Source::new(job, rank, Stream::Stdout, stdout)?);
        stderrs.push(Source::new(job, rank, Stream::Stderr, stderr)?);
    }
    Ok((crew, [stdouts, stderrs]))
}

fn program(job: &Job) -> Result<PathBuf, LaunchError> {
    let search_path = std::env::var_os("PATH");
    find_program(&job.program, search_path.as_deref()).ok_or_else(|| LaunchError::ProgramNotFound {
        program: job.program.clone(),
    })
}

fn trampoline(job: &Job) -> Result<PathBuf, LaunchError> {
    let running = || std::env::current_exe().map_err(|source| LaunchError::Trampoline { source });
    job.trampoline
        .as_deref()
        .map(Path::to_owned)
        .map_or_else(running, Ok)
}

/// Where the ranks will meet. The port is free now; rank 0 binds it in a moment.
fn master(job: &Job) -> Result<Master, LaunchError> {
    let addr = job.master_addr.clone();
    let free_port = || {
        let listener = TcpListener::bind((addr.as_str(), 0))?;
        listener.local_addr().map(|address| address.port())
    };
    match job.master_port.map_or_else(free_port, Ok) {
        Ok(port) => Ok(Master { addr, port }),
        Err(source) => Err(LaunchError::Port {
            address: addr,
            source,
        }),
    }
}

/// The watch over a crew: what has been seen, and what has been done about it.
struct Watch {
    crew: Crew,
    signals: Signals,
    started: Instant,
    grace: Duration,
    /// Of the first local rank.
    first_rank: usize,
    phase: Phase,
    /// The last signal sent to those that were left.
    told: Option<i32>,
    interrupted: Option<i32>,
    ends: Vec<Option<End>>,
}

impl Watch {
    fn new(crew: Crew, signals: Signals, started: Instant, job: &Job) -> Watch {
        let ends = crew.members().iter().map(|_| None).collect();
        Watch {
            crew,
            signals,
            started,
            grace: job.grace,
            first_rank: job.rank_of(0),
            phase: Phase::Running,
            told: None,
            interrupted: None,
            ends,
        }
    }

    fn until_all_ended(&mut self) -> io::Result<()> {
        while self.ends.iter().any(Option::is_none) {
            self.wait()?;
            let now = Instant::now();
            if self.see_ends(now)? {
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

    /// Until a rank ends, a signal arrives, or the grace is over.
    fn wait(&self) -> io::Result<()> {
        let mut fds: Vec<PollFd<'_>> = self
            .left()
            .map(|(_, member)| PollFd::from_borrowed_fd(member.as_fd(), PollFlags::IN))
            .chain([PollFd::from_borrowed_fd(
                self.signals.as_fd(),
                PollFlags::IN,
            )])
            .collect();
        let patience = self.phase.patience(Instant::now());
        let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
        match poll(&mut fds, patience.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Records the ranks that have ended; whether one of them failed.
    fn see_ends(&mut self, now: Instant) -> io::Result<bool> {
        let mut seen = Vec::new();
        for (rank, member) in self.left() {
            if let Some(how) = member.ended()? {
                seen.push((rank, member.pid().as_raw_pid().unsigned_abs(), how));
            }
        }
        let has_failed = seen.iter().any(|(_, _, how)| !how.is_success());
        for (rank, pid, how) in seen {
            self.ends[rank] = Some(self.end_of(rank, pid, how, now));
        }
        Ok(has_failed)
    }

    fn end_of(&self, rank: usize, pid: u32, how: How, now: Instant) -> End {
        End {
            rank: self.first_rank + rank,
            pid,
            how,
            after: now.duration_since(self.started),
            told: self.told,
            last_lines: Vec::new(),
        }
    }

    fn react(&mut self, event: Event, now: Instant) {
        let (phase, signal) = self.phase.after(event, now, self.grace);
        self.phase = phase;
        if let Some(signal) = signal {
            self.tell(signal);
        }
    }

    /// Signals the groups of all ranks: of those that ended too, because what they have started
    /// may be left.
    fn tell(&mut self, signal: Signal) {
        self.told = Some(signal.as_raw());
        for member in self.crew.members() {
            member.signal(signal);
        }
    }

    fn left(&self) -> impl Iterator<Item = (usize, &crate::crew::Member)> {
        let members = self.crew.members().iter().enumerate();
        members.filter(|(rank, _)| self.ends[*rank].is_none())
    }

    fn outcome(self, last_lines: Vec<Vec<String>>) -> Outcome {
        let mut last_lines = last_lines.into_iter();
        let ends = self.ends.into_iter().flatten().map(|end| End {
            last_lines: last_lines.next().unwrap_or_default(),
            ..end
        });
        Outcome::new(ends.collect(), self.interrupted)
    }
}
