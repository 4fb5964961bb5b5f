//! Doing it: keeps the place, starts and stops workers as decided, and sees the run to its end.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::runtime::Handle;
use trainyard_elastic::{
    EPOCH, FULL_WORLD_SIZE, Job, LEAST_WORLD_SIZE, Outcome, Ranks, Signals, Workers,
};
use trainyard_rendezvous::{Address, Advert, Join, Place, Policy, Report, Secret, Seen};

use crate::decide::{Action, Ending, Event, Graces, State};
use crate::exchange::Exchange;
use crate::line::Line;
use crate::{AgentError, Store, Way};

/// Workers of a broken world may hang in a collective, and everybody waits for the slowest.
const BROKEN_GRACE: Duration = Duration::from_millis(500);
/// How long an agent that serves the run waits for the others to hear of its end, beyond a lease.
const PATIENCE: Duration = Duration::from_secs(5);

/// A machine's part in a run.
#[derive(Clone, Debug)]
pub struct Part {
    /// What to run here; where it stands in the world is filled in.
    pub job: Job,
    /// Where the agents meet.
    pub way: Way,
    /// What only agents of this run know.
    pub secret: Secret,
    /// What the run asks of its worlds.
    pub policy: Policy,
    /// This machine's name in the run.
    pub node: String,
    /// The rank it asks for.
    pub node_rank: Option<u32>,
    /// Its address, on which others reach the workers' store.
    pub host: String,
    /// The store's port; 0 is any free one.
    pub store_port: u16,
    /// A folder for `epoch_E/node_N/RANK/{stdout,stderr}.log`.
    pub log_dir: Option<PathBuf>,
}

/// How it went.
#[derive(Debug)]
pub struct Attendance {
    /// How the agent's part ended.
    pub ending: Ending,
    /// What became of the last workers here; none if none were started.
    pub outcome: Option<Outcome>,
}

/// Takes part in a run to its end: returns when this machine has no workers of it and never will.
///
/// The program that calls this must call [`worker::intercept`](trainyard_elastic::worker::intercept)
/// first in its `main`, unless the job names another trampoline.
pub fn attend(part: &Part) -> Result<Attendance, AgentError> {
    part.job.find_program()?;
    let signals = Signals::watch()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let store = Store::serve(&part.host, part.store_port, runtime.handle());
    let store = store.map_err(|source| AgentError::Store {
        address: format!("{}:{}", part.host, part.store_port),
        source,
    })?;
    let join = part.join(store.address().port())?;
    let handle = runtime.handle().clone();
    let line = Line::open(runtime, part.way.clone(), part.secret.clone(), join)?;
    let mut agent = Agent {
        part,
        signals,
        store,
        line,
        runtime: handle,
        workers: None,
        exchange: None,
        outcome: None,
        faults: Vec::new(),
        state: State::new(Graces {
            leaving: part.job.grace,
            broken: part.job.grace.min(BROKEN_GRACE),
        }),
        next_beat: Instant::now(),
    };
    let ending = agent.until_the_end()?;
    agent.line.close(part.policy.lease + PATIENCE);
    match ending {
        Ending::Cut(error) => Err(error.into()),
        ending => Ok(Attendance {
            ending,
            outcome: agent.outcome,
        }),
    }
}

impl Part {
    fn join(&self, store_port: u16) -> io::Result<Join> {
        let advert = Advert {
            node: self.node.clone(),
            instance: random()?,
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
            policy: self.policy.clone(),
            advert,
            seen: Seen::default(),
            said: None,
        })
    }

    /// The job at a place in a world.
    fn job_at(&self, place: &Place) -> Job {
        let mut job = self.job.clone();
        (job.num_nodes, job.node_rank) = (place.num_nodes as usize, place.node_rank as usize);
        job.ranks = Some(Ranks {
            first: place.first_rank as usize,
            world_size: place.world_size as usize,
        });
        job.restart_count = place.restarts as usize;
        job.max_restarts = self.policy.max_restarts as usize;
        job.master_addr = place.store.host.clone();
        job.master_port = Some(place.store.port);
        job.output.log_dir = self.log_dir.as_ref().map(|folder| {
            let (epoch, node) = (place.epoch.0, place.node_rank);
            folder.join(format!("epoch_{epoch}/node_{node}"))
        });
        // The same on all nodes of a world.
        let per_node = place.world_size.div_ceil(place.num_nodes.max(1));
        let with = |num_nodes: u32| (per_node * num_nodes).to_string();
        job.env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .env(EPOCH, place.epoch.0.to_string())
            .env(FULL_WORLD_SIZE, with(self.policy.max_nodes))
            .env(LEAST_WORLD_SIZE, with(self.policy.min_nodes))
    }
}

/// An agent at work.
struct Agent<'a> {
    part: &'a Part,
    signals: Signals,
    store: Store,
    line: Line,
    runtime: Handle,
    workers: Option<Workers>,
    /// With the agents of the workers' world.
    exchange: Option<Exchange>,
    outcome: Option<Outcome>,
    /// What became of earlier workers here, if it was not good.
    faults: Vec<String>,
    state: State,
    next_beat: Instant,
}

impl Agent<'_> {
    fn until_the_end(&mut self) -> io::Result<Ending> {
        loop {
            self.wait()?;
            // Here and nowhere else: an agent that hangs must lose its lease.
            let now = Instant::now();
            if now >= self.next_beat {
                self.line.heartbeat();
                self.next_beat = now + self.part.policy.heartbeat();
            }
            self.look(now);
            let mut events = self.happened()?;
            while let Some(event) = events.pop_front() {
                for action in self.state.after(event, Instant::now()) {
                    match action {
                        Action::End(ending) => return Ok(ending),
                        action => events.extend(self.act(action)),
                    }
                }
            }
        }
    }

    /// Until a worker ends, there is news, a signal arrives, or it is time for something.
    fn wait(&self) -> io::Result<()> {
        let mut fds = self
            .workers
            .as_ref()
            .map_or_else(Vec::new, Workers::poll_fds);
        for fd in [self.signals.as_fd(), self.line.as_fd()] {
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        let look = self.workers.as_ref().and_then(Workers::look_at);
        let times = [self.state.wake_at(), look, Some(self.next_beat)];
        let until = times.into_iter().flatten().min();
        let until = until.unwrap_or(self.next_beat);
        let patience = until.saturating_duration_since(Instant::now());
        let patience = Timespec::try_from(patience).ok();
        match poll(&mut fds, patience.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// After the workers, with what other agents tell of theirs.
    fn look(&mut self, now: Instant) {
        let (Some(workers), Some(exchange)) = (&mut self.workers, &mut self.exchange) else {
            return;
        };
        exchange.tell(|| workers.seen(), now);
        workers.look(&exchange.heard(), now);
    }

    fn happened(&mut self) -> io::Result<VecDeque<Event>> {
        let mut events = VecDeque::new();
        if let Some(workers) = &mut self.workers {
            if workers.see_ends()? {
                let message = workers.failure().unwrap_or_default();
                events.push_back(Event::Failed {
                    message: shortened(&message),
                });
            }
            if workers.have_ended() {
                self.see_off();
                events.push_back(Event::Ended);
            }
        }
        events.extend(self.signals.arrived().into_iter().map(Event::Signal));
        events.extend(self.line.news());
        events.push_back(Event::Tick);
        Ok(events)
    }

    /// Does it; what follows from that.
    fn act(&mut self, action: Action) -> Vec<Event> {
        match action {
            Action::Start(place) => return self.start(&place),
            Action::Tell(signal) => {
                if let Some(workers) = &mut self.workers {
                    workers.tell(signal);
                }
            }
            Action::Dismiss => {
                if let Some(workers) = &mut self.workers {
                    workers.dismiss();
                }
            }
            Action::Report(epoch, report) => {
                if report == Report::Stopped {
                    self.store.clear();
                }
                self.line.report(epoch, report);
            }
            Action::Leave => self.line.leave(),
            Action::End(_) => {}
        }
        Vec::new()
    }

    fn start(&mut self, place: &Place) -> Vec<Event> {
        if !self.line.is_still(place) {
            return vec![Event::NotStarted];
        }
        self.store.open();
        let mut job = self.part.job_at(place);
        job.faults = self.faults.clone();
        let (first, last) = (job.rank_of(0), job.rank_of(job.nproc - 1));
        tracing::info!(
            "{}: ranks {first} to {last} of {}, node {} of {}, store at {}",
            place.epoch,
            place.world_size,
            place.node_rank,
            place.num_nodes,
            place.store
        );
        match Workers::start(&job) {
            Ok(workers) => {
                self.workers = Some(workers);
                self.exchange = Some(Exchange::start(place, &self.runtime));
                Vec::new()
            }
            Err(error) => {
                let message = shortened(&error.to_string());
                vec![Event::Failed { message }, Event::Ended]
            }
        }
    }

    fn see_off(&mut self) {
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

/// A message as short as the rendezvous takes it: its first line, and as much of the end as fits.
fn shortened(message: &str) -> String {
    const LONGEST: usize = Report::LONGEST_MESSAGE;
    if message.len() <= LONGEST {
        return message.to_owned();
    }
    const GAP: &str = "\n    ...";
    let (first, rest) = message.split_once('\n').unwrap_or((message, ""));
    let first: String = first.chars().take(LONGEST / 8).collect();
    let room = LONGEST.saturating_sub(first.len() + GAP.len());
    let mut start = rest.len().saturating_sub(room);
    while !rest.is_char_boundary(start) {
        start += 1;
    }
    format!("{first}{GAP}{}", &rest[start..])
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
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
        assert!(short.len() <= Report::LONGEST_MESSAGE);
        assert!(short.starts_with("rank 3 exited with code 1\n"));
        assert!(short.ends_with("line é 399"));
        assert_eq!(shortened("short"), "short");
        assert!(shortened(&"é".repeat(5000)).len() <= Report::LONGEST_MESSAGE);
    }
}
