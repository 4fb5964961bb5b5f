//! The loop of the agent: renews the lease, starts and stops workers as decided, and runs until the run ends.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::runtime::Handle;
use trainyard_launcher::{
    Job, MAX_WORLD_SIZE, MIN_WORLD_SIZE, NODE_ADDR, Outcome, RankRange, Signals, Workers,
};
use trainyard_rendezvous::{
    Address, Join, NodeInfo, Policy, RankAssignment, Report, RunSecret, Watermark,
};

use crate::heartbeat_exchange::HeartbeatExchange;
use crate::rendezvous_handle::RendezvousHandle;
use crate::state::{Action, AgentExit, Event, GracePeriods, State};
use crate::{AgentError, RendezvousConfig, WorkerStore};

/// Workers of a broken world may block in a collective, and all nodes wait for the slowest.
const ABORT_GRACE: Duration = Duration::from_millis(500);
/// How long an agent with an embedded server waits, beyond a lease, for the other agents to learn the outcome.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The configuration of an agent.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// The workers to run on this node; the agent fills in their ranks.
    pub job: Job,
    /// The rendezvous backend.
    pub rendezvous: RendezvousConfig,
    /// The secret that authenticates the agents of this run to each other.
    pub secret: RunSecret,
    /// The size and the timeouts of the run.
    pub policy: Policy,
    /// The name of this node, unique in the run.
    pub node_name: String,
    /// The node rank to request.
    pub node_rank: Option<u32>,
    /// The address of this node, at which other nodes reach its agent and its workers.
    pub host: String,
    /// The port at which other agents reach the workers' store; 0 for any free one.
    pub store_port: u16,
    /// A directory for `epoch_E/node_N/RANK/{stdout,stderr}.log`.
    pub log_dir: Option<PathBuf>,
}

/// The result of [`run_agent`].
#[derive(Debug)]
pub struct AgentOutcome {
    /// Why the agent exited.
    pub exit: AgentExit,
    /// The outcome of the last workers on this node; `None` if the agent started none.
    pub workers: Option<Outcome>,
}

/// Runs the agent of this node until the run ends or the agent leaves it. Returns when no workers are left on this
/// node.
///
/// The calling program must call [`worker::intercept`](trainyard_launcher::worker::intercept) first in its `main`,
/// unless the job names another trampoline.
pub fn run_agent(config: &AgentConfig) -> Result<AgentOutcome, AgentError> {
    config.job.find_program()?;
    let signals = Signals::watch(&config.job.signals)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let store = WorkerStore::serve(
        (&config.host, config.store_port),
        (&config.job.run_id, &config.secret),
        config.job.nproc,
        runtime.handle(),
    );
    let store = store.map_err(|source| AgentError::Store {
        address: format!("{}:{}", config.host, config.store_port),
        source,
    })?;
    let join = config.join(store.relay_address().port())?;
    let handle = runtime.handle().clone();
    let rendezvous = RendezvousHandle::open(
        runtime,
        config.rendezvous.clone(),
        config.secret.clone(),
        join,
    )?;
    let mut agent = Agent {
        config,
        signals,
        store,
        rendezvous,
        runtime: handle,
        workers: None,
        exchange: None,
        outcome: None,
        faults: Vec::new(),
        state: State::new(GracePeriods {
            leave: config.job.grace,
            abort: config.job.grace.min(ABORT_GRACE),
        }),
        next_heartbeat: Instant::now(),
    };
    let exit = agent.run()?;
    agent.rendezvous.close(config.policy.lease + CLOSE_TIMEOUT);
    match exit {
        AgentExit::Disconnected(error) => Err(error.into()),
        exit => Ok(AgentOutcome {
            exit,
            workers: agent.outcome,
        }),
    }
}

impl AgentConfig {
    fn join(&self, store_port: u16) -> io::Result<Join> {
        let node_info = NodeInfo {
            node: self.node_name.clone(),
            instance: getrandom::u64().map_err(io::Error::other)?,
            num_workers: u32::try_from(self.job.nproc).unwrap_or(u32::MAX),
            capabilities: BTreeSet::new(),
            node_rank: self.node_rank,
            store: Address {
                host: self.host.clone(),
                port: store_port,
            },
        };
        Ok(Join {
            run: self.job.run_id.clone(),
            policy: self.policy.clone().for_command(&self.job.command()),
            node_info,
            watermark: Watermark::default(),
            last_report: None,
        })
    }

    /// The job with the ranks of an assignment, whose workers reach their store at `store`.
    fn assigned_job(&self, assignment: &RankAssignment, store: SocketAddr) -> Job {
        let mut job = self.job.clone();
        job.num_nodes = assignment.num_nodes as usize;
        job.node_rank = assignment.node_rank as usize;
        job.ranks = Some(RankRange {
            first: assignment.first_rank as usize,
            world_size: assignment.world_size as usize,
        });
        job.restart_count = assignment.restarts as usize;
        job.epoch = Some(assignment.epoch.0);
        job.max_restarts = self.policy.max_restarts as usize;
        job.master_addr = store.ip().to_string();
        job.master_port = Some(store.port());
        job.world_store = Some(assignment.store.to_string());
        job.output.log_dir = self.log_dir.as_ref().map(|dir| {
            let (epoch, node) = (assignment.epoch.0, assignment.node_rank);
            dir.join(format!("epoch_{epoch}/node_{node}"))
        });
        // Rounded up, so that all nodes of a world compute the same value.
        let per_node = assignment.world_size.div_ceil(assignment.num_nodes.max(1));
        let world_size = |num_nodes: u32| (per_node * num_nodes).to_string();
        job.env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .env(NODE_ADDR, &self.host)
            .env(MAX_WORLD_SIZE, world_size(self.policy.max_nodes))
            .env(MIN_WORLD_SIZE, world_size(self.policy.min_nodes))
    }
}

/// A running agent.
struct Agent<'a> {
    config: &'a AgentConfig,
    signals: Signals,
    store: WorkerStore,
    rendezvous: RendezvousHandle,
    runtime: Handle,
    workers: Option<Workers>,
    /// Shares heartbeats with the other agents of the workers' world.
    exchange: Option<HeartbeatExchange>,
    outcome: Option<Outcome>,
    /// Failure reports of earlier workers on this node.
    faults: Vec<String>,
    state: State,
    next_heartbeat: Instant,
}

impl Agent<'_> {
    fn run(&mut self) -> io::Result<AgentExit> {
        loop {
            self.wait()?;
            // The lease is renewed only here: an agent whose loop hangs must lose it.
            let now = Instant::now();
            if now >= self.next_heartbeat {
                self.rendezvous.heartbeat();
                self.next_heartbeat = now + self.config.policy.heartbeat();
            }
            self.poll_workers(now);
            let mut events = self.events()?;
            while let Some(event) = events.pop_front() {
                for action in self.state.on_event(event, Instant::now()) {
                    match action {
                        Action::Exit(exit) => return Ok(exit),
                        action => events.extend(self.execute(action)),
                    }
                }
            }
        }
    }

    /// Waits until a worker exits, the rendezvous decides something, a signal arrives, or a timer is due.
    fn wait(&self) -> io::Result<()> {
        let mut fds = self
            .workers
            .as_ref()
            .map_or_else(Vec::new, Workers::poll_fds);
        for fd in [self.signals.as_fd(), self.rendezvous.as_fd()] {
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        let next_poll = self.workers.as_ref().and_then(Workers::next_poll);
        let timers = [self.state.deadline(), next_poll, Some(self.next_heartbeat)];
        let until = timers.into_iter().flatten().min();
        let until = until.unwrap_or(self.next_heartbeat);
        let timeout = until.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(timeout).ok();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Looks for hung workers, with the heartbeats of other nodes for the diagnosis.
    fn poll_workers(&mut self, now: Instant) {
        let (Some(workers), Some(exchange)) = (&mut self.workers, &mut self.exchange) else {
            return;
        };
        exchange.publish(|| workers.statuses(), now);
        workers.poll(&exchange.peer_statuses(), now);
    }

    /// The events since the last call.
    fn events(&mut self) -> io::Result<VecDeque<Event>> {
        let mut events = VecDeque::new();
        if let Some(workers) = &mut self.workers {
            if workers.reap_exited()? {
                let message = workers.failure_report().unwrap_or_default();
                events.push_back(Event::WorkerFailed {
                    message: shortened(&message),
                    is_final: workers.has_final_failure(),
                });
            }
            if workers.all_exited() {
                self.finish_workers();
                events.push_back(Event::WorkersExited);
            }
        }
        events.extend(self.signals.pending().into_iter().map(Event::Signal));
        events.extend(self.rendezvous.events());
        events.push_back(Event::Tick);
        Ok(events)
    }

    /// Executes an action; returns the events that result from it.
    fn execute(&mut self, action: Action) -> Vec<Event> {
        match action {
            Action::Start(assignment) => return self.start(&assignment),
            Action::Signal(signal) => {
                if let Some(workers) = &mut self.workers {
                    workers.signal(signal);
                }
            }
            Action::Abort => {
                if let Some(workers) = &mut self.workers {
                    workers.abort();
                }
            }
            Action::Report(epoch, report) => {
                if report == Report::Stopped {
                    self.store.clear();
                }
                self.rendezvous.report(epoch, report);
            }
            Action::Leave => self.rendezvous.leave(),
            Action::Exit(_) => {}
        }
        Vec::new()
    }

    fn start(&mut self, assignment: &RankAssignment) -> Vec<Event> {
        if !self.rendezvous.is_current(assignment) {
            return vec![Event::StartSkipped];
        }
        self.store.open(assignment);
        let local_store = self.store.local_address();
        let mut job = self.config.assigned_job(assignment, local_store);
        job.faults = self.faults.clone();
        let (first, last) = (job.rank_of(0), job.rank_of(job.nproc - 1));
        tracing::info!(
            "{}: ranks {first} to {last} of {}, node {} of {}, store at {}",
            assignment.epoch,
            assignment.world_size,
            assignment.node_rank,
            assignment.num_nodes,
            assignment.store
        );
        match Workers::start(&job, &self.signals) {
            Ok(workers) => {
                self.workers = Some(workers);
                self.exchange = Some(HeartbeatExchange::start(
                    assignment,
                    local_store,
                    self.needs_all_heartbeats(assignment),
                    &self.runtime,
                ));
                Vec::new()
            }
            Err(error) => {
                let message = shortened(&error.to_string());
                let failed = Event::WorkerFailed {
                    message,
                    is_final: false,
                };
                vec![failed, Event::WorkersExited]
            }
        }
    }

    /// Whether this agent shows metrics of the whole job: the one of the first node does.
    fn needs_all_heartbeats(&self, assignment: &RankAssignment) -> bool {
        assignment.node_rank == 0 && self.config.job.observer.is_some()
    }

    fn finish_workers(&mut self) {
        self.exchange = None;
        let Some(workers) = self.workers.take() else {
            return;
        };
        let outcome = workers.finish(None);
        if let Some(report) = outcome.report() {
            tracing::warn!("{report}");
            self.faults.push(report);
        }
        self.outcome = Some(outcome);
    }
}

/// Shortens a message to what the rendezvous accepts: its first line, and as much of the end as fits.
fn shortened(message: &str) -> String {
    const MAX_BYTES: usize = Report::MAX_MESSAGE_BYTES;
    if message.len() <= MAX_BYTES {
        return message.to_owned();
    }
    const GAP: &str = "\n    ...";
    let (first, rest) = message.split_once('\n').unwrap_or((message, ""));
    let first: String = first.chars().take(MAX_BYTES / 8).collect();
    let room = MAX_BYTES.saturating_sub(first.len() + GAP.len());
    let mut start = rest.len().saturating_sub(room);
    while !rest.is_char_boundary(start) {
        start += 1;
    }
    format!("{first}{GAP}{}", &rest[start..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_keeps_its_beginning_and_its_end() {
        let lines: Vec<String> = (0..400)
            .map(|line| format!("    | line é {line}"))
            .collect();
        let message = format!("rank 3 exited with code 1\n{}", lines.join("\n"));
        let short = shortened(&message);
        assert!(short.len() <= Report::MAX_MESSAGE_BYTES);
        assert!(short.starts_with("rank 3 exited with code 1\n"));
        assert!(short.ends_with("line é 399"));
        assert_eq!(shortened("short"), "short");
        assert!(shortened(&"é".repeat(5000)).len() <= Report::MAX_MESSAGE_BYTES);
    }
}
