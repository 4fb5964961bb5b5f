//! What is to be run: a program, how many times, and where its output goes.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use crate::Outcome;

/// N local ranks of one program, alone or with as many on every other machine.
#[derive(Clone, Debug)]
pub struct Job {
    /// The program: a path, or a name looked up on `PATH`.
    pub program: PathBuf,
    /// Its arguments, the same for every rank.
    pub args: Vec<OsString>,
    /// How many ranks on this machine.
    pub nproc: usize,
    /// How many machines, each with as many ranks.
    pub num_nodes: usize,
    /// Which of them this is (`GROUP_RANK`).
    pub node_rank: usize,
    /// Which ranks are on this machine, where machines have more or fewer than this one.
    pub ranks: Option<Ranks>,
    /// How often it may be started again after a failure (`TORCHELASTIC_MAX_RESTARTS`).
    pub max_restarts: usize,
    /// How often it was (`TORCHELASTIC_RESTART_COUNT`).
    pub restart_count: usize,
    /// The name of the job (`TORCHELASTIC_RUN_ID`).
    pub run_id: String,
    /// The role of the ranks (`ROLE_NAME`).
    pub role: String,
    /// Where the ranks meet (`MASTER_ADDR`).
    pub master_addr: String,
    /// The port they meet at (`MASTER_PORT`); a free one when not given.
    pub master_port: Option<u16>,
    /// Variables added to every rank's environment; they win over all others.
    pub env: Vec<(OsString, OsString)>,
    /// Where the ranks' output goes.
    pub output: Output,
    /// How long ranks have between being told to end and SIGKILL.
    pub grace: Duration,
    /// How long a rank may be at something that is no step before it is taken to hang; steps have a limit
    /// of their own, which is learned. When not given nobody is.
    pub hang_timeout: Option<Duration>,
    /// What happened before this start, for those who look at the job.
    pub faults: Vec<String>,
    /// The program through which workers start (see [`worker`](crate::worker)); the running one
    /// when not given.
    pub trampoline: Option<PathBuf>,
}

/// A machine's ranks among all.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ranks {
    /// The first on this machine.
    pub first: usize,
    /// How many there are on all machines.
    pub world_size: usize,
}

/// Where the ranks' output goes.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// What appears on the launcher's stdout and stderr.
    pub console: Console,
    /// Only these ranks appear there; all when not given.
    pub console_ranks: Option<Vec<usize>>,
    /// A folder for `RANK/stdout.log` and `RANK/stderr.log`, made if missing.
    pub log_dir: Option<PathBuf>,
}

/// How the ranks' lines appear on the launcher's stdout and stderr.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Console {
    /// With `[rank0]: ` before every line.
    #[default]
    Prefixed,
    /// As they are.
    Plain,
    /// Not at all.
    Silent,
}

impl Job {
    /// `nproc` ranks of `program`, with the defaults of a job on one machine.
    pub fn new(program: impl Into<PathBuf>, nproc: usize) -> Job {
        Job {
            program: program.into(),
            args: Vec::new(),
            nproc,
            num_nodes: 1,
            node_rank: 0,
            ranks: None,
            max_restarts: 0,
            restart_count: 0,
            run_id: "none".to_owned(),
            role: "default".to_owned(),
            master_addr: "127.0.0.1".to_owned(),
            master_port: None,
            env: Vec::new(),
            output: Output::default(),
            grace: Duration::from_secs(2),
            hang_timeout: Some(Duration::from_secs(1800)),
            faults: Vec::new(),
            trampoline: None,
        }
    }

    /// The rank, among all machines', of a local one.
    pub fn rank_of(&self, local_rank: usize) -> usize {
        let first = self.node_rank * self.nproc;
        self.ranks.map_or(first, |ranks| ranks.first) + local_rank
    }

    /// How many ranks all machines have together.
    pub fn world_size(&self) -> usize {
        let even = self.num_nodes * self.nproc;
        self.ranks.map_or(even, |ranks| ranks.world_size)
    }

    /// Whether it is to be started again after it ended so: it failed of its own accord, and not too
    /// often yet.
    pub fn may_restart(&self, outcome: &Outcome) -> bool {
        let failed = outcome.first_failure.is_some() && outcome.interrupted.is_none();
        failed && self.restart_count < self.max_restarts
    }

    /// Adds arguments.
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Job {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a variable to every rank's environment.
    pub fn env(mut self, key: impl Into<OsString>, value: impl Into<OsString>) -> Job {
        self.env.push((key.into(), value.into()));
        self
    }

    /// Says how lines appear on the console.
    pub fn console(mut self, console: Console) -> Job {
        self.output.console = console;
        self
    }

    /// Writes the ranks' output into files under a folder.
    pub fn log_dir(mut self, log_dir: impl Into<PathBuf>) -> Job {
        self.output.log_dir = Some(log_dir.into());
        self
    }

    /// Starts workers through another program than the running one.
    pub fn trampoline(mut self, program: impl Into<PathBuf>) -> Job {
        self.trampoline = Some(program.into());
        self
    }
}
