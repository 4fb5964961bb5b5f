//! The ranks of one start, as whoever watches them sees them: who is left, how the others ended,
//! and a way to tell them all.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;

use trainyard_trace::{PULSE_FOLDER, Pulse, Sighting};

use crate::board::Board;
use crate::crew::{Crew, Member};
use crate::line::SharedTail;
use crate::output::{Source, Stream, pump};
use crate::report::{End, How, Outcome};
use crate::vigil::Vigil;
use crate::{Job, LaunchError, Master, Patience, environment, find_program, worker};

/// What a rank wrote before its end is in its pipe, and read in less than this.
const LAST_LINES_WITHIN: Duration = Duration::from_millis(50);

/// The ranks of a job on this machine, started once. Dropping them ends them.
///
/// The thread that starts them must live as long as they: the kernel counts its end as the death of
/// the parent.
#[derive(Debug)]
pub struct Workers {
    crew: Crew,
    started: Instant,
    /// Of the first local rank.
    first_rank: usize,
    /// The last signal sent to those that were left.
    told: Option<i32>,
    ends: Vec<Option<End>>,
    /// Of every rank, its last lines on stderr.
    tails: Vec<SharedTail>,
    pumps: Vec<JoinHandle<()>>,
    /// Where they leave their pulses; none if there is no room for that, or nobody is to look.
    board: Option<Board>,
    vigil: Vigil,
    patience: Patience,
    /// Those that were killed because they hung, and why.
    hung: BTreeMap<usize, String>,
    /// Closed when what the ranks wrote is in the pipes, and nothing more will be.
    until_done: OwnedFd,
}

impl Workers {
    /// Starts every rank of a job, and carries their output.
    ///
    /// The program that calls this must call [`worker::intercept`] first in its `main`, unless the job
    /// names another trampoline.
    pub fn start(job: &Job) -> Result<Workers, LaunchError> {
        let started = Instant::now();
        let board = job.hang_timeout.and_then(|_| hang_up(job));
        let (crew, [stdouts, stderrs]) = start(job, board.as_ref())?;
        let tails = stderrs.iter().map(Source::tail).collect();
        let (stop, until_done) = pipe_with(PipeFlags::CLOEXEC).map_err(watch_error)?;
        let stops = [stop.try_clone().map_err(watch_error)?, stop];
        let streams = [(Stream::Stdout, stdouts), (Stream::Stderr, stderrs)];
        let pumps = streams.into_iter().zip(stops);
        let pumps = pumps.map(|((stream, sources), stop)| {
            let thread = thread::Builder::new().name("output of ranks".to_owned());
            thread.spawn(move || pump(stream, sources, stop.as_fd()))
        });
        Ok(Workers {
            started,
            first_rank: job.rank_of(0),
            told: None,
            ends: crew.members().iter().map(|_| None).collect(),
            crew,
            tails,
            pumps: pumps.collect::<io::Result<_>>().map_err(watch_error)?,
            board,
            vigil: Vigil::new(started),
            patience: Patience {
                otherwise: job.hang_timeout.unwrap_or(Duration::MAX),
            },
            hung: BTreeMap::new(),
            until_done,
        })
    }

    /// Whether none is left.
    pub fn have_ended(&self) -> bool {
        self.ends.iter().all(Option::is_some)
    }

    /// What becomes readable when one of those that are left ends.
    pub fn poll_fds(&self) -> Vec<PollFd<'_>> {
        self.left()
            .map(|(_, member)| PollFd::from_borrowed_fd(member.as_fd(), PollFlags::IN))
            .collect()
    }

    /// Records the ranks that have ended; whether one of them failed.
    pub fn see_ends(&mut self) -> io::Result<bool> {
        let now = Instant::now();
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

    /// When to [look](Self::look) after them again, if they are to be looked after.
    pub fn look_at(&self) -> Option<Instant> {
        let watched = self.board.is_some() && self.told.is_none() && !self.have_ended();
        watched.then(|| self.vigil.next())
    }

    /// Looks at the pulses of those that are left, if it is time. Kills who hangs, which is then seen as an end like
    /// any other, and tells of who is slow. `others` are ranks of other machines, as far as they are known.
    pub fn look(&mut self, others: &[Sighting], now: Instant) {
        let Some(board) = self.board.as_ref() else {
            return;
        };
        if self.look_at().is_none_or(|at| at > now) {
            return;
        }
        let left: Vec<usize> = self
            .left()
            .map(|(rank, _)| self.first_rank + rank)
            .collect();
        self.vigil.look(board.folder(), left.into_iter(), now);
        let own = self.vigil.seen();
        let all: Vec<Sighting> = own.iter().chain(others).cloned().collect();
        for blame in self.patience.blame(&own, &all) {
            let local = blame.rank - self.first_rank;
            if self.hung.contains_key(&blame.rank) {
                continue;
            }
            // Now: a report waits until the others have ended.
            tracing::warn!("killing rank {}, which hangs: {}", blame.rank, blame.why);
            self.crew.members()[local].signal(Signal::KILL);
            self.hung.insert(blame.rank, blame.why);
        }
        for slow in self.vigil.newly_slow(&all) {
            tracing::warn!("{slow}");
        }
    }

    /// What was last seen of the ranks here.
    pub fn seen(&self) -> Vec<Sighting> {
        self.vigil.seen()
    }

    /// Tells all ranks to end, because their world is broken: there is nothing to finish.
    pub fn dismiss(&mut self) {
        if let Some(board) = &self.board {
            board.call_it_over();
        }
        self.tell(Signal::TERM);
    }

    /// Signals the groups of all ranks: of those that ended too, because what they have started
    /// may be left.
    pub fn tell(&mut self, signal: Signal) {
        self.told = Some(signal.as_raw());
        for member in self.crew.members() {
            member.signal(signal);
        }
    }

    /// What is known now of the rank that failed first: who, how, and its last lines.
    pub fn failure(&self) -> Option<String> {
        let ends = self.ends.iter().flatten().cloned().collect();
        let mut outcome = Outcome::new(ends, None);
        let first = outcome.first_failure?;
        let tail = &self.tails[first - self.first_rank];
        let end = outcome.ends.iter_mut().find(|end| end.rank == first)?;
        end.last_lines = tail.whole_lines(LAST_LINES_WITHIN);
        outcome.first_words()
    }

    /// Ends whatever is left, and judges.
    pub fn finish(self, interrupted: Option<i32>) -> Outcome {
        let Workers {
            mut crew,
            ends,
            tails,
            pumps,
            until_done,
            first_rank,
            ..
        } = self;
        crew.end();
        // What the ranks wrote is in the pipes now; the pumps carry that and stop.
        drop(until_done);
        for pump in pumps {
            let _ = pump.join();
        }
        let with_lines = |end: End| End {
            last_lines: tails[end.rank - first_rank].lines(),
            ..end
        };
        let ends = ends.into_iter().flatten().map(with_lines).collect();
        Outcome::new(ends, interrupted)
    }

    fn end_of(&self, rank: usize, pid: u32, how: How, now: Instant) -> End {
        End {
            rank: self.first_rank + rank,
            pid,
            how,
            after: now.duration_since(self.started),
            told: self.told,
            hung: self.hung.get(&(self.first_rank + rank)).cloned(),
            whereabouts: self.last_pulse(self.first_rank + rank),
            last_lines: Vec::new(),
        }
    }

    /// Where a rank was, from its last pulse.
    fn last_pulse(&self, rank: usize) -> Option<String> {
        let folder = self.board.as_ref()?.folder();
        let pulse = Pulse::read(folder, rank)?;
        Some(pulse.whereabouts())
    }

    fn left(&self) -> impl Iterator<Item = (usize, &Member)> {
        let members = self.crew.members().iter().enumerate();
        members.filter(|(rank, _)| self.ends[*rank].is_none())
    }
}

pub(crate) fn watch_error(error: impl Into<io::Error>) -> LaunchError {
    let source = error.into();
    LaunchError::Watch { source }
}

/// Starts every rank; gives the ways of their stdout and of their stderr.
fn start(job: &Job, board: Option<&Board>) -> Result<(Crew, [Vec<Source>; 2]), LaunchError> {
    if std::env::var_os(worker::MARK).is_some() {
        return Err(LaunchError::NotATrampoline);
    }
    if job.nproc == 0 {
        return Err(LaunchError::NoRanks);
    }
    let program = job.find_program()?;
    let trampoline = trampoline(job)?;
    let master = master(job)?;
    let mut crew = Crew::new(&trampoline)?;
    let (mut stdouts, mut stderrs) = (Vec::new(), Vec::new());
    for rank in 0..job.nproc {
        let is_set = |name: &str| std::env::var_os(name).is_some();
        let mut environment = environment(job, rank, &master, is_set);
        environment.extend(board.map(|board| (PULSE_FOLDER.into(), board.folder().into())));
        let [stdout, stderr] = crew.start(job, &program, &trampoline, environment)?;
        stdouts.push(Source::new(job, rank, Stream::Stdout, stdout)?);
        stderrs.push(Source::new(job, rank, Stream::Stderr, stderr)?);
    }
    Ok((crew, [stdouts, stderrs]))
}

/// A job runs without a board as well; then only nobody can look after it.
fn hang_up(job: &Job) -> Option<Board> {
    let board = Board::hang_up(job);
    board
        .inspect_err(|error| tracing::warn!("ranks that hang will not be found: {error}"))
        .ok()
}

impl Job {
    /// The file that every rank will execute.
    pub fn find_program(&self) -> Result<PathBuf, LaunchError> {
        let search_path = std::env::var_os("PATH");
        let found = find_program(&self.program, search_path.as_deref());
        found.ok_or_else(|| LaunchError::ProgramNotFound {
            program: self.program.clone(),
        })
    }
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
