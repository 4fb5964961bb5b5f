//! `trainyard ui`: a page of a job that runs on this node.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use trainyard_heartbeat::{HeartbeatMemory, HeartbeatMonitor};
use trainyard_launcher::{
    Job, JobInfo, JobObserver, Observation, Outcome, RankRange, running_jobs,
};
use trainyard_telemetry::TelemetryConfig;

use super::job_ranks::{local_heartbeats, remote_ranks};
use super::telemetry_args::{build, prediction, start};
use crate::failure::Failure;

/// Serve a page that shows a job on this node: curves, waits of every rank, the mesh, memory, faults
///
/// Shows a job that `trainyard run` started on this node as the same user, from now on. `trainyard run --ui-port` serves the
/// same page from the start of the job. Over SSH, forward the port: `ssh -L 8080:localhost:8080 NODE`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard ui\n  \
    trainyard ui llama7 --port 8080 --plan plan.json")]
pub struct Ui {
    /// The name of the job (--rdzv-id), if several run on this node
    #[arg(value_name = "RUN")]
    run: Option<String>,
    /// The port; 0 chooses a free one
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    port: u16,
    /// The address; only programs of this host reach the default
    #[arg(long, value_name = "ADDR", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    addr: IpAddr,
    /// The output of `trainyard plan --json`, which the page shows beside what is measured
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
}

/// How often heartbeats are read. The page is updated once a second.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

impl Ui {
    /// Serves the page until the user interrupts it.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let run_id = self.run_id()?;
        let telemetry = start(TelemetryConfig {
            run_id: run_id.clone(),
            is_attached: true,
            build: build(),
            per_rank: false,
            metrics: None,
            otlp: None,
            page: Some(SocketAddr::new(self.addr, self.port)),
            prediction: prediction(self.plan.as_deref())?,
        })?;
        if let Some(url) = telemetry.page_url() {
            println!("page: {url}");
        }
        let observer = telemetry.observer();
        let mut followed = Followed::default();
        loop {
            let jobs = running_jobs().into_iter();
            let launchers = jobs.filter(|info| info.run_id == run_id).collect();
            followed.update(launchers, &*observer, Instant::now());
            thread::sleep(POLL_INTERVAL);
        }
    }

    fn run_id(&self) -> Result<String, Failure> {
        let mut found: Vec<String> = running_jobs().into_iter().map(|info| info.run_id).collect();
        found.dedup();
        let names = found.join(", ");
        match (&self.run, &found[..]) {
            (_, []) => Err(Failure::new("no job runs on this node")
                .hint("start one with `trainyard run --ui-port 8080`")),
            (Some(run), _) if found.contains(run) => Ok(run.clone()),
            (Some(run), _) => Err(Failure::usage(format!("no job {run} runs on this node"))
                .hint(format!("these run: {names}"))),
            (None, [only]) => Ok(only.clone()),
            (None, _) => Err(Failure::usage("several jobs run on this node")
                .hint(format!("name one of them: {names}"))),
        }
    }
}

/// A job as its launchers on this node publish it.
#[derive(Debug, Default)]
struct Followed {
    launchers: Vec<JobInfo>,
    nodes: Vec<Node>,
}

/// The ranks of one launcher.
#[derive(Debug)]
struct Node {
    ranks: Range<usize>,
    memory: HeartbeatMemory,
    monitor: HeartbeatMonitor,
}

impl Followed {
    /// Tells the observer what has changed.
    fn update(&mut self, launchers: Vec<JobInfo>, observer: &dyn JobObserver, now: Instant) {
        if launchers != self.launchers {
            if !self.launchers.is_empty() {
                observer.ended(&Outcome {
                    exits: Vec::new(),
                    first_failure: None,
                    interrupted_by: None,
                });
            }
            if let Some(first) = launchers.first() {
                observer.started(&job(first));
            }
            self.nodes = launchers
                .iter()
                .filter_map(|info| node(info, now))
                .collect();
            self.launchers = launchers;
        }
        if !self.launchers.is_empty() {
            self.observe(observer, now);
        }
    }

    fn observe(&mut self, observer: &dyn JobObserver, now: Instant) {
        let mut ranks = Vec::new();
        for node in &mut self.nodes {
            node.monitor.poll(&node.memory, node.ranks.clone(), now);
            ranks.extend(node.monitor.statuses());
        }
        let spread = self.launchers.iter().find(|info| info.num_nodes > 1);
        for (_, status) in spread.map(remote_ranks).unwrap_or_default() {
            let rank = status.heartbeat.rank;
            if !ranks.iter().any(|known| known.heartbeat.rank == rank) {
                ranks.push(status);
            }
        }
        let mut slow_ranks = Vec::new();
        if let Some(node) = self.nodes.first_mut() {
            node.monitor.new_stragglers(&ranks);
            slow_ranks = node.monitor.slow_ranks();
        }
        observer.observed(&Observation {
            ranks: &ranks,
            slow_ranks: &slow_ranks,
            num_hung: 0,
            now,
        });
    }
}

fn node(info: &JobInfo, now: Instant) -> Option<Node> {
    let (memory, ranks) = local_heartbeats(info)?;
    Some(Node {
        ranks,
        memory,
        monitor: HeartbeatMonitor::new(now),
    })
}

/// The job that a launcher publishes, as far as observers need it.
fn job(info: &JobInfo) -> Job {
    let mut job = Job::new("", info.num_ranks);
    job.run_id.clone_from(&info.run_id);
    job.restart_count = info.restarts;
    job.faults.clone_from(&info.faults);
    job.ranks = Some(RankRange {
        first: info.first_rank,
        world_size: info.world_size,
    });
    job
}
