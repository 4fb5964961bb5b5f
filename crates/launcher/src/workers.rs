//! The workers of one node: starting them, polling their heartbeats, signaling them and recording their exits.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;

use trainyard_heartbeat::{
    HangDetector, HeartbeatMemory, HeartbeatMonitor, RankStatus, is_progress_slow, slow_progress,
};

use crate::error_file::{ERROR_FILE, ErrorFiles, RecordedError};
use crate::idle::{IdleMonitor, log_python_stacks};
use crate::lines::SharedTail;
use crate::numa::cpus_of_rank;
use crate::observer::{JobObserver, Observation};
use crate::oom_kills::oom_kills;
use crate::output::{Source, Stream, create_filtered_log, forward};
use crate::progress::JobProgress;
use crate::report::{ExitStatus, Outcome, WorkerExit, signal_name};
use crate::runtime_dir::RuntimeDir;
use crate::signals::Signals;
use crate::visible_gpus::VISIBLE_DEVICES;
use crate::worker::CPUS;
use crate::worker_process::{WorkerProcess, WorkerProcesses};
use crate::{Console, Job, LaunchError, Master, color, environment, find_program, worker};

/// The output that a rank wrote before its exit is in its pipe, and read within this time.
const STDERR_TIMEOUT: Duration = Duration::from_millis(50);

/// The workers of a job on this node. Dropping them kills them.
///
/// The thread that starts them must outlive them: to the kernel, its end is the death of the parent.
#[derive(Debug)]
pub struct Workers {
    processes: WorkerProcesses,
    started: Instant,
    /// The global rank of local rank 0.
    first_rank: usize,
    /// The last signal sent to the workers.
    last_signal: Option<i32>,
    /// How long they may take to stop after a signal that was forwarded.
    grace: Duration,
    is_silent: bool,
    /// By local rank; `None` while the worker runs.
    exits: Vec<Option<WorkerExit>>,
    /// The last lines of every local rank's stderr.
    stderr_tails: Vec<SharedTail>,
    output_threads: Vec<JoinHandle<()>>,
    progress: JobProgress,
    /// The heartbeats of the workers; `None` if it could not be allocated.
    heartbeats: Option<HeartbeatMemory>,
    /// Makes the job visible to `trainyard top`; `None` if it could not be created.
    _runtime_dir: Option<RuntimeDir>,
    /// Where workers record the exceptions that end them.
    error_files: Option<ErrorFiles>,
    monitor: HeartbeatMonitor,
    /// `None` without hang detection.
    detector: Option<HangDetector>,
    /// The kills of the out-of-memory killer before the workers started, if the kernel counts them.
    oom_kills: Option<u64>,
    observer: Option<Arc<dyn JobObserver>>,
    /// The ranks that the launcher killed because they hung, and the reasons.
    hung: BTreeMap<usize, String>,
    /// Watches ranks that write no heartbeats.
    idle: IdleMonitor,
    /// Whether a step takes longer than usual, and a warning was logged.
    is_slow: bool,
    /// Closed when no worker will write to the pipes any more.
    stop_output: OwnedFd,
}

impl Workers {
    /// Starts every local rank of a job and forwards their output. A signal ends the starting: the caller finds it in
    /// `signals`, and stops the ranks that have been started.
    ///
    /// The calling program must call [`worker::intercept`] first in its `main`, unless the job names another
    /// trampoline.
    pub fn start(job: &Job, signals: &Signals) -> Result<Workers, LaunchError> {
        let started = Instant::now();
        let heartbeats = allocate_heartbeats(job);
        let runtime_dir = create_runtime_dir(job, heartbeats.as_ref());
        let error_files = ErrorFiles::create(job);
        let (processes, [stdouts, stderrs]) =
            start(job, heartbeats.as_ref(), error_files.as_ref(), signals)?;
        let stderr_tails = stderrs.iter().map(Source::tail).collect();
        let (stop, stop_output) = pipe_with(PipeFlags::CLOEXEC).map_err(watch_error)?;
        let stops = [stop.try_clone().map_err(watch_error)?, stop];
        let filtered = |stream| create_filtered_log(stream, &job.output);
        let streams = [
            (Stream::Stdout, stdouts, filtered(Stream::Stdout)?),
            (Stream::Stderr, stderrs, filtered(Stream::Stderr)?),
        ];
        let threads = streams.into_iter().zip(stops);
        let progress = JobProgress::new(job);
        let threads = threads.map(|((stream, sources, filtered), stop)| {
            let thread = thread::Builder::new().name("rank output".to_owned());
            let progress = progress.clone();
            thread.spawn(move || forward(stream, sources, filtered, &progress, stop.as_fd()))
        });
        if let Some(observer) = &job.observer {
            observer.started(job);
        }
        Ok(Workers {
            started,
            first_rank: job.rank_of(0),
            last_signal: None,
            grace: job.grace,
            is_silent: job.output.console == Console::Silent,
            exits: processes.by_local_rank().iter().map(|_| None).collect(),
            processes,
            stderr_tails,
            output_threads: threads.collect::<io::Result<_>>().map_err(watch_error)?,
            progress,
            heartbeats,
            _runtime_dir: runtime_dir,
            error_files,
            monitor: HeartbeatMonitor::new(started),
            detector: job
                .hang_timeout
                .map(|default_timeout| HangDetector { default_timeout }),
            oom_kills: oom_kills(),
            observer: job.observer.clone(),
            hung: BTreeMap::new(),
            idle: IdleMonitor::new(started),
            is_slow: false,
            stop_output,
        })
    }

    /// Whether all workers have exited.
    pub fn all_exited(&self) -> bool {
        self.exits.iter().all(Option::is_some)
    }

    /// File descriptors that become readable when a running worker exits.
    pub fn poll_fds(&self) -> Vec<PollFd<'_>> {
        self.running()
            .map(|(_, process)| PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN))
            .collect()
    }

    /// Records the workers that have exited since the last call; returns whether one of them failed.
    pub fn reap_exited(&mut self) -> io::Result<bool> {
        let now = Instant::now();
        let mut exited = Vec::new();
        for (rank, process) in self.running() {
            if let Some(status) = process.exit_status()? {
                exited.push((rank, process.pid().as_raw_pid().unsigned_abs(), status));
            }
        }
        let has_failed = exited.iter().any(|(_, _, status)| !status.is_success());
        for (rank, pid, status) in exited {
            self.exits[rank] = Some(self.worker_exit(rank, pid, status, now));
        }
        Ok(has_failed)
    }

    /// When to [poll](Self::poll) heartbeats again. `None` if there are none, or if the workers are stopping.
    pub fn next_poll(&self) -> Option<Instant> {
        let is_watched =
            self.heartbeats.is_some() && self.last_signal.is_none() && !self.all_exited();
        is_watched.then(|| self.monitor.next_poll())
    }

    /// Reads the heartbeats of running workers, if it is time. Kills workers that hang, whose exits are then recorded
    /// like any other, and logs stragglers. `others` are ranks of other nodes, as far as they are known.
    pub fn poll(&mut self, others: &[RankStatus], now: Instant) {
        let Some(heartbeats) = self.heartbeats.as_ref() else {
            return;
        };
        if self.next_poll().is_none_or(|at| at > now) {
            return;
        }
        let running: Vec<usize> = self
            .running()
            .map(|(rank, _)| self.first_rank + rank)
            .collect();
        self.monitor.poll(heartbeats, running.into_iter(), now);
        let local = self.monitor.statuses();
        self.progress.update(&local);
        if local.is_empty() {
            self.warn_of_idleness(now);
        }
        let all: Vec<RankStatus> = local.iter().chain(others).cloned().collect();
        let detect = |detector: &HangDetector| detector.hung_ranks(&local, &all);
        for hung in self.detector.as_ref().map_or_else(Vec::new, detect) {
            let local_rank = hung.rank - self.first_rank;
            if self.hung.contains_key(&hung.rank) {
                continue;
            }
            // Logged now, because the report comes only after the other workers have exited.
            tracing::warn!("rank {} hangs, killing it: {}", hung.rank, hung.reason);
            self.processes.by_local_rank()[local_rank].signal(Signal::KILL);
            self.hung.insert(hung.rank, hung.reason);
        }
        self.warn_of_slow_progress(&local, &all);
        for straggler in self.monitor.new_stragglers(&all) {
            tracing::warn!("{straggler}");
        }
        if let Some(observer) = &self.observer {
            observer.observed(&Observation {
                ranks: &all,
                slow_ranks: &self.monitor.slow_ranks(),
                num_hung: self.hung.len(),
                now,
            });
        }
    }

    /// Logs once that ranks which write no heartbeats do nothing.
    fn warn_of_idleness(&mut self, now: Instant) {
        let pid = |process: &WorkerProcess| process.pid().as_raw_pid().unsigned_abs();
        let running = self.running();
        let running: Vec<(usize, u32)> = running
            .map(|(rank, process)| (self.first_rank + rank, pid(process)))
            .collect();
        if self.detector.is_some()
            && let Some(why) = self.idle.poll(&running, now)
        {
            tracing::warn!("{why}");
            log_python_stacks(running);
        }
    }

    /// Logs once what holds up ranks whose programs do not say whether they are in a step.
    fn warn_of_slow_progress(&mut self, local: &[RankStatus], all: &[RankStatus]) {
        let was_slow = std::mem::replace(&mut self.is_slow, is_progress_slow(local));
        if was_slow && !self.is_slow {
            tracing::warn!("the ranks take steps again");
        }
        if was_slow {
            return;
        }
        if let Some(why) = slow_progress(local, all) {
            let limit = self.detector.map_or_else(String::new, |detector| {
                let seconds = detector.default_timeout.as_secs();
                format!(". After {seconds} s without a step the rank is killed (--hang-timeout)")
            });
            tracing::warn!("no step has ended for longer than steps take: {why}{limit}");
        }
    }

    /// The status of the local ranks at the last poll.
    pub fn statuses(&self) -> Vec<RankStatus> {
        self.monitor.statuses()
    }

    /// Sends SIGTERM to all workers because their world is broken, and marks it as aborted: they have nothing to
    /// finish.
    pub fn abort(&mut self) {
        if let Some(heartbeats) = &self.heartbeats
            && let Err(error) = heartbeats.mark_aborted()
        {
            tracing::warn!("cannot let the workers know that their world is broken: {error}");
        }
        self.send(Signal::TERM);
    }

    /// Forwards a signal that the launcher has received, or kills the workers.
    pub fn signal(&mut self, signal: Signal) {
        if signal != Signal::KILL && !self.is_silent {
            let num = self.running().count();
            eprintln!("{}", waiting_notice(signal, num, self.grace));
        }
        self.send(signal);
    }

    /// Signals the process groups of all workers, also of those that exited: processes they started may be left.
    fn send(&mut self, signal: Signal) {
        self.last_signal = Some(signal.as_raw());
        for process in self.processes.by_local_rank() {
            process.signal(signal);
        }
    }

    /// A report of the first failure so far: which rank failed and how, and its last lines.
    pub fn failure_report(&self) -> Option<String> {
        let exits = self.exits.iter().flatten().cloned().collect();
        let mut outcome = Outcome::new(exits, None);
        let first = outcome.first_failure?;
        let tail = &self.stderr_tails[first - self.first_rank];
        let exit = outcome.exits.iter_mut().find(|exit| exit.rank == first)?;
        exit.stderr_tail = tail.complete_lines(STDERR_TIMEOUT);
        outcome.failure_report()
    }

    /// Whether a worker failed in a way that a restart would not cure.
    pub fn has_final_failure(&self) -> bool {
        self.exits
            .iter()
            .flatten()
            .any(|exit| exit.status.is_final())
    }

    /// Kills whatever is left, and returns the outcome.
    pub fn finish(self, interrupted_by: Option<i32>) -> Outcome {
        let Workers {
            mut processes,
            exits,
            stderr_tails,
            output_threads,
            progress,
            stop_output,
            first_rank,
            observer,
            ..
        } = self;
        processes.kill_all();
        // All output is in the pipes now; the threads forward it and stop.
        drop(stop_output);
        for thread in output_threads {
            let _ = thread.join();
        }
        progress.finish();
        let with_tail = |exit: WorkerExit| WorkerExit {
            stderr_tail: stderr_tails[exit.rank - first_rank].lines(),
            ..exit
        };
        let exits = exits.into_iter().flatten().map(with_tail).collect();
        let outcome = Outcome::new(exits, interrupted_by);
        if let Some(observer) = observer {
            observer.ended(&outcome);
        }
        outcome
    }

    fn worker_exit(
        &self,
        local_rank: usize,
        pid: u32,
        status: ExitStatus,
        now: Instant,
    ) -> WorkerExit {
        let rank = self.first_rank + local_rank;
        WorkerExit {
            rank,
            pid,
            status,
            after: now.duration_since(self.started),
            last_signal: self.last_signal,
            hang_reason: self.hung.get(&rank).cloned(),
            is_oom: self.is_oom(status),
            last_position: self.last_position(rank),
            recorded_error: self.recorded_error(local_rank, status),
            stderr_tail: Vec::new(),
        }
    }

    /// Whether the out-of-memory killer ended a worker: the launcher did not send it SIGKILL, and the kernel has counted
    /// a kill.
    fn is_oom(&self, status: ExitStatus) -> bool {
        let is_killed = status == ExitStatus::Signaled(Signal::KILL.as_raw());
        is_killed && self.last_signal.is_none() && oom_kills() > self.oom_kills
    }

    /// What a worker that failed has recorded. Another program may write something else: that is only logged.
    fn recorded_error(&self, local_rank: usize, status: ExitStatus) -> Option<RecordedError> {
        let files = self.error_files.as_ref().filter(|_| !status.is_success())?;
        let read = RecordedError::read(&files.path(local_rank));
        read.inspect_err(|error| {
            tracing::warn!("the error file of local rank {local_rank} is unreadable: {error}");
        })
        .ok()?
    }

    /// The position of a rank in its last heartbeat.
    fn last_position(&self, rank: usize) -> Option<String> {
        let heartbeat = self.heartbeats.as_ref()?.read(rank)?;
        Some(heartbeat.describe())
    }

    fn running(&self) -> impl Iterator<Item = (usize, &WorkerProcess)> {
        let processes = self.processes.by_local_rank().iter().enumerate();
        processes.filter(|(rank, _)| self.exits[*rank].is_none())
    }
}

/// Says what the launcher waits for after a signal, and how to stop waiting.
fn waiting_notice(signal: Signal, num_ranks: usize, grace: Duration) -> String {
    let name = signal_name(signal.as_raw());
    let ranks = if num_ranks == 1 { "rank" } else { "ranks" };
    format!(
        "received {name}: waiting up to {} s for {num_ranks} {ranks} to stop; press Ctrl-C or signal again to kill them",
        grace.as_secs()
    )
}

pub(crate) fn watch_error(error: impl Into<io::Error>) -> LaunchError {
    let source = error.into();
    LaunchError::Watch { source }
}

/// Starts every local rank, or fewer if a signal arrives; returns the sources of their stdout and of their stderr.
fn start(
    job: &Job,
    heartbeats: Option<&HeartbeatMemory>,
    error_files: Option<&ErrorFiles>,
    signals: &Signals,
) -> Result<(WorkerProcesses, [Vec<Source>; 2]), LaunchError> {
    if std::env::var_os(worker::MARK).is_some() {
        return Err(LaunchError::NotATrampoline);
    }
    if job.nproc == 0 {
        return Err(LaunchError::NoRanks);
    }
    let program = job.find_program()?;
    let trampoline = trampoline(job)?;
    let master = master(job)?;
    let mut processes = WorkerProcesses::new(&trampoline)?;
    let (mut stdouts, mut stderrs) = (Vec::new(), Vec::new());
    for rank in 0..job.nproc {
        // There is always a first rank, so that the job ends as one that was interrupted.
        if rank > 0 && signals.have_arrived() {
            break;
        }
        let is_set = |name: &str| std::env::var_os(name).is_some();
        let mut environment = environment(job, rank, &master, is_set);
        // Log files have no colors.
        environment.extend(color::environment().filter(|_| job.output.log_dir.is_none()));
        if let Some(heartbeats) = heartbeats {
            environment.extend(heartbeats.environment(job.rank_of(rank)));
        }
        environment.extend(placement(job, rank)?);
        let error_file = error_files.map(|files| files.prepare(rank));
        environment.push((ERROR_FILE.into(), error_file.unwrap_or_default().into()));
        let [stdout, stderr] = processes.start(job, &program, &trampoline, environment)?;
        stdouts.push(Source::new(job, rank, Stream::Stdout, stdout)?);
        stderrs.push(Source::new(job, rank, Stream::Stderr, stderr)?);
    }
    Ok((processes, [stdouts, stderrs]))
}

/// The variables that say which GPU and which processors a rank may use.
fn placement(job: &Job, local_rank: usize) -> Result<Vec<(OsString, OsString)>, LaunchError> {
    let place = job.first_local_rank + local_rank;
    let mut variables = Vec::new();
    if job.virtual_local_rank {
        let given = std::env::var(VISIBLE_DEVICES).ok();
        let mut entries = given.iter().flat_map(|list| list.split(',')).map(str::trim);
        let gpu = match &given {
            None => place.to_string(),
            Some(_) => entries
                .nth(place)
                .ok_or(LaunchError::NoVisibleGpu { local_rank: place })?
                .to_owned(),
        };
        variables.push((VISIBLE_DEVICES.into(), gpu.into()));
    }
    if let Some(binding) = job.numa_binding {
        let failed = |source| LaunchError::Numa {
            local_rank: place,
            source,
        };
        let cpus = cpus_of_rank(binding, place).map_err(failed)?;
        variables.push((CPUS.into(), cpus.into()));
    }
    Ok(variables)
}

/// Failures are only logged: a job also runs without hang detection.
fn allocate_heartbeats(job: &Job) -> Option<HeartbeatMemory> {
    HeartbeatMemory::create(job.rank_of(0), job.nproc)
        .inspect_err(|error| {
            tracing::warn!("cannot allocate heartbeats, hang detection is off: {error}");
        })
        .ok()
}

/// Failures are only logged: nothing but `trainyard top` needs the directory.
fn create_runtime_dir(job: &Job, heartbeats: Option<&HeartbeatMemory>) -> Option<RuntimeDir> {
    RuntimeDir::create(job, heartbeats)
        .inspect_err(|error| {
            tracing::warn!("`trainyard top` will not show the job: {error}");
        })
        .ok()
}

impl Job {
    /// The file that every rank executes.
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

/// `MASTER_ADDR` and `MASTER_PORT`. A port chosen here is free now; rank 0 binds it a moment later.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_notice_names_the_signal_and_the_way_out() {
        let notice = waiting_notice(Signal::INT, 1, Duration::from_secs(30));
        assert_eq!(
            notice,
            "received SIGINT: waiting up to 30 s for 1 rank to stop; press Ctrl-C or signal again to kill them"
        );
    }
}
