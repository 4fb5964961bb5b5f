//! The description of a job: its program, its ranks, and where their output goes.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::{JobObserver, LineFilters, NumaBinding, Outcome, StreamSelection};

/// The ranks of one program on this node, alone or as part of a job on several nodes.
#[derive(Clone, Debug)]
pub struct Job {
    /// The program: a path, or a name looked up on `PATH`.
    pub program: PathBuf,
    /// Its arguments, the same for every rank; `${local_rank}` in them becomes the local rank.
    pub args: Vec<OsString>,
    /// The number of ranks on this node (`LOCAL_WORLD_SIZE`).
    pub nproc: usize,
    /// The number of nodes (`GROUP_WORLD_SIZE`).
    pub num_nodes: usize,
    /// The rank of this node (`GROUP_RANK`).
    pub node_rank: usize,
    /// The global ranks of this node; if not given, every node has `nproc` ranks.
    pub ranks: Option<RankRange>,
    /// The first `LOCAL_RANK`, if other jobs of this node have the ones before.
    pub first_local_rank: usize,
    /// How many restarts after failures are allowed (`TORCHELASTIC_MAX_RESTARTS`).
    pub max_restarts: usize,
    /// How many times the job was restarted (`TORCHELASTIC_RESTART_COUNT`).
    pub restart_count: usize,
    /// The name of the job (`TORCHELASTIC_RUN_ID`).
    pub run_id: String,
    /// The role of the ranks (`ROLE_NAME`).
    pub role: String,
    /// The address of rank 0's store (`MASTER_ADDR`).
    pub master_addr: String,
    /// The port of that store (`MASTER_PORT`); a free one if not given.
    pub master_port: Option<u16>,
    /// The address of the store that the agents of a job share, which tells jobs of the same name apart; only with
    /// agents.
    pub world_store: Option<String>,
    /// The epoch of an elastic run to which this world belongs (`TRAINYARD_EPOCH`).
    pub epoch: Option<u64>,
    /// Variables added to every rank's environment; they take precedence over all others.
    pub env: Vec<(OsString, OsString)>,
    /// Where the ranks' output goes.
    pub output: Output,
    /// The grace period between the first signal and SIGKILL.
    pub grace: Duration,
    /// How long a rank may start, save or evaluate before it counts as hung; for steps the launcher learns a limit.
    /// Without a value there is no hang detection.
    pub hang_timeout: Option<Duration>,
    /// Which processors each rank may use, by its GPU; all if not given.
    pub numa_binding: Option<NumaBinding>,
    /// Whether every rank sees its own GPU only, as GPU 0, and has `LOCAL_RANK` 0.
    pub virtual_local_rank: bool,
    /// Signals that end the job, in addition to SIGINT, SIGTERM, SIGHUP and SIGQUIT.
    pub signals: Vec<i32>,
    /// Reports of earlier failures of the job, for `trainyard top`.
    pub faults: Vec<String>,
    /// Learns how the job goes.
    pub observer: Option<Arc<dyn JobObserver>>,
    /// The program through which workers start (see [`worker`](crate::worker)); the running one if not given.
    pub trampoline: Option<PathBuf>,
}

/// The global ranks of a node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RankRange {
    /// The first rank on this node.
    pub first: usize,
    /// The number of ranks on all nodes.
    pub world_size: usize,
}

/// Where the ranks' output goes.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// How the output appears on the launcher's stdout and stderr.
    pub console: Console,
    /// The local ranks whose output appears there; all if not given.
    pub console_ranks: Option<Vec<usize>>,
    /// What the prefix calls the ranks, and the number of the first one; `rank` and its global rank if not given.
    pub label: Option<(String, usize)>,
    /// A directory for `RANK/stdout.log` and `RANK/stderr.log`, created if missing.
    pub log_dir: Option<PathBuf>,
    /// The streams that go to these files only.
    pub redirects: StreamSelection,
    /// The streams that appear on the console although they are redirected.
    pub tee: StreamSelection,
    /// The lines of stdout on the console that are also in `filtered_stdout.log`.
    pub stdout_filters: LineFilters,
    /// The lines of stderr on the console that are also in `filtered_stderr.log`.
    pub stderr_filters: LineFilters,
}

/// How the ranks' lines appear on the launcher's stdout and stderr.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Console {
    /// Every line is prefixed with its rank, as in `[rank0]: `.
    #[default]
    Prefixed,
    /// Lines appear unchanged.
    Plain,
    /// Lines do not appear.
    Silent,
}

impl Job {
    /// `nproc` ranks of `program`, with the defaults of a job on one node.
    pub fn new(program: impl Into<PathBuf>, nproc: usize) -> Job {
        Job {
            program: program.into(),
            args: Vec::new(),
            nproc,
            num_nodes: 1,
            node_rank: 0,
            ranks: None,
            first_local_rank: 0,
            max_restarts: 0,
            restart_count: 0,
            run_id: "none".to_owned(),
            role: "default".to_owned(),
            master_addr: "127.0.0.1".to_owned(),
            master_port: None,
            world_store: None,
            epoch: None,
            env: Vec::new(),
            output: Output::default(),
            grace: Duration::from_secs(2),
            hang_timeout: Some(Duration::from_secs(1800)),
            numa_binding: None,
            virtual_local_rank: false,
            signals: Vec::new(),
            faults: Vec::new(),
            observer: None,
            trampoline: None,
        }
    }

    /// The name of the program, which may be in another directory on every node, and its arguments.
    pub fn command(&self) -> Vec<&OsStr> {
        let name = self.program.file_name().unwrap_or(self.program.as_os_str());
        let args = self.args.iter().map(OsString::as_os_str);
        std::iter::once(name).chain(args).collect()
    }

    /// The global rank of a local rank.
    pub fn rank_of(&self, local_rank: usize) -> usize {
        let first = self.node_rank * self.nproc;
        self.ranks.map_or(first, |ranks| ranks.first) + local_rank
    }

    /// The number of ranks on all nodes.
    pub fn world_size(&self) -> usize {
        let even = self.num_nodes * self.nproc;
        self.ranks.map_or(even, |ranks| ranks.world_size)
    }

    /// Whether to restart the job after this outcome: a rank failed in a way that a restart may cure, the launcher was
    /// not interrupted, and restarts are left.
    pub fn may_restart(&self, outcome: &Outcome) -> bool {
        let failed = outcome.first_failure.is_some() && outcome.interrupted_by.is_none();
        failed && !outcome.has_final_failure() && self.restart_count < self.max_restarts
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

    /// Sets how lines appear on the console.
    pub fn console(mut self, console: Console) -> Job {
        self.output.console = console;
        self
    }

    /// Also writes the ranks' output into files under a directory.
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
