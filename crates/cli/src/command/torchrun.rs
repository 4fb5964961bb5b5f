//! torchrun's options, spelled with dashes or underscores, and the job that they describe.
//!
//! Options that make no difference here are accepted and ignored. Options that are not supported are rejected by
//! name.

use std::cell::OnceCell;
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, SystemTime};

use clap::builder::BoolishValueParser;
use clap::{Arg, ArgAction, Args, Command};
use rustix::process::Signal;
use trainyard_launcher::{
    Job, LineFilters, NumaBinding, StreamSelection, VISIBLE_DEVICES, num_gpus, signal_name,
    visible_gpus,
};

use super::python::ProgramKind;
use super::rdzv::{ElasticArgs, RdzvArgs};
use crate::failure::Failure;

/// torchrun's options.
#[derive(Debug, Args)]
pub struct Torchrun {
    /// Number of ranks per node: a number, `cpu`, `gpu`, or `auto` (GPUs if there are any, else cores)
    #[arg(long, value_name = "N", default_value = "1")]
    nproc_per_node: String,
    /// Run on this node only, with a free MASTER_PORT (this is the default)
    #[arg(long)]
    standalone: bool,
    #[command(flatten)]
    rdzv: RdzvArgs,
    /// Number of restarts after failures
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_restarts: usize,
    /// Address of rank 0, with --rdzv-backend static (MASTER_ADDR); 127.0.0.1 by default
    #[arg(long, value_name = "HOST")]
    master_addr: Option<String>,
    /// Port on that address (MASTER_PORT); by default a free one, or 29500 on several nodes
    #[arg(long, value_name = "PORT")]
    master_port: Option<u16>,
    /// Ignored, accepted for compatibility with torchrun: exits of ranks are noticed immediately
    #[arg(long, value_name = "SECONDS")]
    monitor_interval: Option<f64>,
    /// Ignored, accepted for compatibility with torchrun: ranks are always new processes
    #[arg(long, value_name = "METHOD")]
    start_method: Option<String>,
    /// Role of the ranks (ROLE_NAME)
    #[arg(long, value_name = "NAME", default_value = "default")]
    role: String,
    /// Also write the output of ranks to DIR/ID/attempt_0/RANK/{stdout,stderr}.log; in elastic runs to
    /// DIR/ID/epoch_E/node_N/RANK/
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Streams to write to log files only: 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or such a number for some local
    /// ranks, as in `0:3,1:2`. Without --log-dir the files are in a temporary directory, whose path is printed
    #[arg(short, long, value_name = "0..3|RANK:0..3,..", default_value = "0")]
    redirects: StreamSelection,
    /// Streams to write to log files and to the console, written like --redirects
    #[arg(short, long, value_name = "0..3|RANK:0..3,..", default_value = "0")]
    tee: StreamSelection,
    /// Also write the lines of stdout that contain one of these texts, such as `loss,error`, to `filtered_stdout.log`
    /// beside the log files of ranks; two commas are one comma of a text
    #[arg(
        long,
        value_name = "TEXTS",
        default_value = "",
        hide_default_value = true
    )]
    duplicate_stdout_filters: LineFilters,
    /// The same for stderr, in `filtered_stderr.log`
    #[arg(
        long,
        value_name = "TEXTS",
        default_value = "",
        hide_default_value = true
    )]
    duplicate_stderr_filters: LineFilters,
    /// Show only these local ranks on the console, such as `0,1`
    #[arg(long, value_name = "RANKS")]
    local_ranks_filter: Option<LocalRanks>,
    /// Grace period in seconds between SIGTERM and SIGKILL when this program gets a signal, in which ranks can save a
    /// checkpoint; after a failure at most 2
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = default_shutdown_timeout())]
    shutdown_timeout: u64,
    /// Seconds without progress after which a rank that starts, saves or evaluates counts as hung and is killed; for
    /// training steps the limit is learned: 5 s or three times the p99 step time, whichever is longer. 0 turns hang
    /// detection off
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    hang_timeout: u64,
    /// Bind ranks to the processors near their GPUs: those of its NUMA node or of its socket, a share of the cores of the
    /// node for each GPU, or those that share a cache
    #[arg(long, value_name = "node|socket|exclusive|core-complex")]
    numa_binding: Option<NumaBinding>,
    /// Give every rank LOCAL_RANK 0 and show it only its own GPU
    #[arg(long)]
    virtual_local_rank: bool,
    /// Signals that also end the job, with time for a checkpoint, such as SIGUSR1 of Slurm
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    signals_to_handle: Vec<String>,
    /// Ignored, accepted for compatibility with torchrun
    #[arg(long, value_name = "NAME")]
    event_log_handler: Option<String>,
    /// Not supported: a plugin of torchrun cannot run here
    #[arg(long, value_name = "NAME", hide = true)]
    logs_specs: Option<String>,
    /// The directory for the log files of this run, once it is chosen.
    #[arg(skip)]
    run_dir: OnceCell<PathBuf>,
    /// Run PROGRAM with Python, whatever its name
    #[arg(long)]
    run_path: bool,
    /// Run PROGRAM as a Python module, like `python -m`
    #[arg(short, long)]
    module: bool,
    /// Execute PROGRAM directly even if its name ends in .py
    #[arg(long, conflicts_with = "module")]
    no_python: bool,
    /// The program and its arguments; a Python script is run with `python3 -u`, or with the Python of PYTHON_EXEC
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
}

/// Gives every option what torchrun's have: a second spelling, with underscores, and a variable `PET_OPTION`, which
/// Kubeflow sets.
pub fn with_spellings(run: Command) -> Command {
    run.mut_args(|arg| {
        let Some(option) = arg.get_long().map(|option| option.replace('-', "_")) else {
            return arg;
        };
        let variable = format!("PET_{}", option.to_uppercase());
        let arg = accepting_boolish(arg).env(variable).hide_env(true);
        if option.contains('_') {
            arg.alias(option)
        } else {
            arg
        }
    })
}

/// A flag also takes 1 and 0 from its variable.
fn accepting_boolish(arg: Arg) -> Arg {
    match arg.get_action() {
        ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
        _ => arg,
    }
}

impl Torchrun {
    /// The job that the options describe.
    pub fn job(&self) -> Result<Job, Failure> {
        self.reject_unsupported()?;
        let mut command = self.command();
        let mut job = Job::new(command.remove(0), nproc(&self.nproc_per_node)?).args(command);
        (job.master_addr, job.master_port) = self.master()?;
        let elastic = self.elastic_args()?;
        if elastic.is_none() {
            (job.num_nodes, job.node_rank) = self.rdzv.static_nodes()?;
            if job.num_nodes > 1 {
                self.require_master(job.num_nodes)?;
                job.master_port = job.master_port.or(Some(MASTER_PORT));
            }
        }
        job.max_restarts = self.max_restarts;
        let id = self.rdzv.id(elastic.as_ref())?;
        job.run_id = match id {
            Some(id) => id.to_owned(),
            // All nodes must have the same.
            None if job.num_nodes > 1 || job.master_port.is_some() => "none".to_owned(),
            None => new_run_id(),
        };
        job.role = self.role.clone();
        job.grace = Duration::from_secs(self.shutdown_timeout);
        let hang_timeout = Some(self.hang_timeout).filter(|seconds| *seconds > 0);
        job.hang_timeout = hang_timeout.map(Duration::from_secs);
        let shown = self.local_ranks_filter.as_ref();
        job.output.console_ranks = shown.and_then(|ranks| ranks.0.clone());
        job.output.log_dir = self.attempt_dir(&job);
        (job.output.redirects, job.output.tee) = (self.redirects.clone(), self.tee.clone());
        job.output.stdout_filters = self.duplicate_stdout_filters.clone();
        job.output.stderr_filters = self.duplicate_stderr_filters.clone();
        job.numa_binding = self.numa_binding;
        job.virtual_local_rank = self.virtual_local_rank;
        job.signals = self.signals()?;
        Ok(job)
    }

    /// The directory for the log files of this attempt, if there are any.
    pub fn attempt_dir(&self, job: &Job) -> Option<PathBuf> {
        let attempt = format!("attempt_{}", job.restart_count);
        let logs = self.log_dir()?;
        let dir = self.run_dir.get_or_init(|| run_dir(logs, job));
        Some(dir.join(attempt))
    }

    /// The arguments of an elastic run; `None` without a rendezvous.
    pub fn elastic_args(&self) -> Result<Option<ElasticArgs>, Failure> {
        if self.standalone {
            Ok(None)
        } else {
            self.rdzv.elastic_args(self.max_restarts)
        }
    }

    /// The directory for log files, if there is one.
    pub fn log_dir(&self) -> Option<&Path> {
        let dir = self.log_dir.as_deref();
        dir.filter(|dir| *dir != Path::new("/dev/null"))
    }

    /// Creates a directory for log files if options need one and none is given. It stays.
    pub fn ensure_log_dir(&mut self) -> Result<(), Failure> {
        let filters = [
            &self.duplicate_stdout_filters,
            &self.duplicate_stderr_filters,
        ];
        let has_filters = filters.iter().any(|filters| !filters.is_empty());
        let is_needed = has_filters || !self.redirects.is_empty() || !self.tee.is_empty();
        if is_needed && self.log_dir.is_none() {
            let dir = tempfile::Builder::new().prefix("trainyard_").tempdir();
            let dir = dir.map_err(|error| {
                Failure::new(format!("cannot create a directory for log files: {error}"))
                    .hint("name one with --log-dir DIR")
            })?;
            let dir = dir.keep();
            eprintln!("logs: {}", dir.display());
            self.log_dir = Some(dir);
        }
        Ok(())
    }

    /// Without an address, every node would look for rank 0 on itself.
    fn require_master(&self, num_nodes: usize) -> Result<(), Failure> {
        if self.master_addr.is_some() || self.rdzv.static_endpoint().is_some() {
            return Ok(());
        }
        let message = format!("--nnodes {num_nodes} needs an address that all nodes know");
        let hint = "add --rdzv-backend server --rdzv-endpoint HOST:PORT, or --master-addr HOST";
        Err(Failure::usage(message).hint(hint))
    }

    fn reject_unsupported(&self) -> Result<(), Failure> {
        let Some(plugin) = &self.logs_specs else {
            return Ok(());
        };
        let message = format!("--logs-specs {plugin}: a plugin of torchrun cannot run here");
        Err(Failure::usage(message)
            .hint("use --log-dir, --redirects, --tee and --local-ranks-filter"))
    }

    /// The signals that end the job in addition to those that always do.
    fn signals(&self) -> Result<Vec<i32>, Failure> {
        let names = self.signals_to_handle.iter().map(|name| name.trim());
        let signal = |name: &str| {
            let number = signal_number(name);
            number.ok_or_else(|| {
                Failure::usage(format!(
                    "--signals-to-handle: there is no signal {name} to handle"
                ))
                .hint("write names such as SIGUSR1,SIGUSR2")
            })
        };
        names.filter(|name| !name.is_empty()).map(signal).collect()
    }

    /// The command that every rank executes.
    fn command(&self) -> Vec<OsString> {
        let guess = || {
            self.program
                .first()
                .map(|program| ProgramKind::guess(Path::new(program)))
        };
        let kind = match (self.run_path, self.module, self.no_python) {
            (true, _, _) => ProgramKind::Script,
            (_, true, _) => ProgramKind::Module,
            (_, _, true) => ProgramKind::Executable,
            _ => guess().unwrap_or(ProgramKind::Executable),
        };
        let program = self.program.iter().cloned();
        kind.command_prefix().into_iter().chain(program).collect()
    }

    /// `MASTER_ADDR` and `MASTER_PORT`; `--standalone` means a free port on this node.
    fn master(&self) -> Result<(String, Option<u16>), Failure> {
        if self.standalone {
            return Ok((LOCAL_ADDR.to_owned(), None));
        }
        let address = self.master_addr.as_deref().unwrap_or(LOCAL_ADDR);
        let given = (address.to_owned(), self.master_port);
        let Some(endpoint) = self.rdzv.static_endpoint() else {
            return Ok(given);
        };
        let Some((host, port)) = endpoint.rsplit_once(':') else {
            return Ok((endpoint.to_owned(), self.master_port));
        };
        match port.parse::<u16>() {
            Ok(port) => Ok((host.to_owned(), Some(port).filter(|port| *port != 0))),
            Err(_) => Err(Failure::usage(format!(
                "--rdzv-endpoint {endpoint}: `{port}` is not a valid port"
            ))
            .hint("write HOST:PORT")),
        }
    }
}

const LOCAL_ADDR: &str = "127.0.0.1";
/// The port of rank 0's store on several nodes, if none is given.
const MASTER_PORT: u16 = 29500;

/// Seconds, as torchrun's variable has them.
fn default_shutdown_timeout() -> u64 {
    const SECONDS: u64 = 30;
    let given = env::var("TORCH_ELASTIC_SHUTDOWN_TIMEOUT");
    given
        .ok()
        .and_then(|given| given.parse().ok())
        .unwrap_or(SECONDS)
}

/// Local ranks such as `0,1`; an empty list means all.
#[derive(Clone, Debug)]
struct LocalRanks(Option<Vec<usize>>);

impl FromStr for LocalRanks {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<LocalRanks, Self::Err> {
        let ranks = text
            .split(',')
            .map(str::trim)
            .filter(|rank| !rank.is_empty());
        let ranks = ranks.map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        Ok(LocalRanks(Some(ranks).filter(|ranks| !ranks.is_empty())))
    }
}

/// More processes than any node has GPUs or cores for: a larger number is a mistake.
const MAX_NPROC: usize = 4096;

fn nproc(value: &str) -> Result<usize, Failure> {
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    let variable = env::var(VISIBLE_DEVICES).ok();
    let gpus = visible_gpus(variable.as_deref(), num_gpus()).len();
    match value {
        "cpu" => Ok(cores()),
        "auto" if gpus == 0 => Ok(cores()),
        "auto" => Ok(gpus),
        "gpu" if gpus == 0 => Err(Failure::usage("--nproc-per-node gpu: this node has no GPU")
            .hint("use a number, `cpu` or `auto`, or look at CUDA_VISIBLE_DEVICES")),
        "gpu" => Ok(gpus),
        number => match number.parse() {
            Ok(nproc) if nproc > MAX_NPROC => Err(Failure::usage(format!(
                "--nproc-per-node {number}: a node runs at most {MAX_NPROC} ranks"
            ))
            .hint("use one rank per GPU or core")),
            Ok(nproc) if nproc > 0 => Ok(nproc),
            _ => Err(Failure::usage(format!(
                "--nproc-per-node {number} is not a valid number of ranks"
            ))
            .hint("use a positive number, `cpu`, `gpu` or `auto`")),
        },
    }
}

/// The number of a signal that a program can handle.
fn signal_number(name: &str) -> Option<i32> {
    let unhandled = [Signal::KILL.as_raw(), Signal::STOP.as_raw()];
    let mut numbers = (1..=64).filter(|number| !unhandled.contains(number));
    numbers.find(|number| signal_name(*number) == name)
}

/// The directory for the log files of a job, which no earlier job of the same name has used.
fn run_dir(logs: &Path, job: &Job) -> PathBuf {
    let candidate = |number: usize| {
        let name = match number {
            1 => job.run_id.clone(),
            _ => format!("{}_{number}", job.run_id),
        };
        let dir = logs.join(name);
        // Nodes may share the file system.
        if job.num_nodes > 1 {
            dir.join(format!("node_{}", job.node_rank))
        } else {
            dir
        }
    };
    let mut number = 1;
    while candidate(number).exists() {
        number += 1;
    }
    candidate(number)
}

/// A name that no other job on this node has.
fn new_run_id() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let seconds = now.map_or(0, |now| now.as_secs());
    format!("{seconds}-{}", std::process::id())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, FromArgMatches as _, Parser};

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        torchrun: Torchrun,
    }

    fn job(line: &str) -> Result<Job, String> {
        let args = ["run"].into_iter().chain(line.split_whitespace());
        let matches = with_spellings(Cli::command()).try_get_matches_from(args);
        let cli = matches.and_then(|matches| Cli::from_arg_matches(&matches));
        let cli = cli.map_err(|error| error.to_string())?;
        cli.torchrun.job().map_err(|failure| failure.to_string())
    }

    fn command(line: &str) -> Vec<String> {
        let job = job(line).unwrap();
        let args = [job.program.into_os_string()].into_iter().chain(job.args);
        args.map(|arg| arg.into_string().unwrap()).collect()
    }

    #[test]
    fn both_spellings_mean_the_same() {
        let dashes = job(
            "--standalone --nproc-per-node 3 --max-restarts 0 --rdzv-id x --log-dir /l \
             --local-ranks-filter 0,2 --shutdown-timeout 7 --role trainer p",
        );
        let underscores = job(
            "--standalone --nproc_per_node=3 --max_restarts=0 --rdzv_id=x --log_dir=/l \
             --local_ranks_filter=0,2 --shutdown_timeout=7 --role=trainer p",
        );
        let (dashes, underscores) = (dashes.unwrap(), underscores.unwrap());
        assert_eq!(format!("{dashes:?}"), format!("{underscores:?}"));
        assert_eq!((dashes.nproc, dashes.role.as_str()), (3, "trainer"));
        assert_eq!(dashes.output.log_dir, Some("/l/x/attempt_0".into()));
        assert_eq!(dashes.output.console_ranks, Some(vec![0, 2]));
        assert_eq!(dashes.grace, Duration::from_secs(7));
    }

    #[test]
    fn options_of_the_program_are_not_parsed() {
        let expected = ["train", "--nproc-per-node", "5", "-m", "--", "-x"];
        let line = "--nproc-per-node 2 -- train --nproc-per-node 5 -m -- -x";
        assert_eq!(command(line), expected);
        assert_eq!(command("train --lr 3e-4"), ["train", "--lr", "3e-4"]);
    }

    #[test]
    fn python_scripts_and_modules_run_with_python() {
        assert_eq!(command("a.py --b"), ["python3", "-u", "a.py", "--b"]);
        assert_eq!(
            command("-m pkg.mod x"),
            ["python3", "-u", "-m", "pkg.mod", "x"]
        );
        assert_eq!(command("--no-python a.py"), ["a.py"]);
        assert_eq!(command("./a.sh"), ["./a.sh"]);
    }

    #[test]
    fn the_master_address_follows_the_options() {
        let master = |line: &str| job(line).map(|job| (job.master_addr, job.master_port));
        let local = "127.0.0.1".to_owned();
        assert_eq!(master("p"), Ok((local.clone(), None)));
        assert_eq!(master("--master-port 5 p"), Ok((local.clone(), Some(5))));
        assert_eq!(master("--rdzv-endpoint h:6 p"), Ok(("h".into(), Some(6))));
        assert_eq!(master("--rdzv-endpoint h:0 p"), Ok(("h".into(), None)));
        let server = "--rdzv-backend server --rdzv-endpoint 127.0.0.1:6 p";
        assert_eq!(master(server), Ok((local.clone(), None)));
        assert_eq!(
            master("--standalone --rdzv-endpoint h:6 p"),
            Ok((local, None))
        );
        assert!(master("--rdzv-endpoint h:x p").is_err());
    }

    #[test]
    fn unsupported_options_are_rejected_by_name() {
        let error = job("--logs-specs plugin p").unwrap_err();
        assert!(error.contains("--logs-specs plugin"), "{error}");
        assert!(error.contains("\nhint: "), "{error}");
        assert!(job("--redirects 4 p").is_err());
        assert!(job("--numa-binding core p").is_err());
        let error = job("--signals-to-handle SIGKILL p").unwrap_err();
        assert!(error.contains("no signal SIGKILL to handle"), "{error}");
    }

    #[test]
    fn static_nodes_have_ranks_and_a_common_port() {
        let nodes = |line: &str| job(line).map(|job| (job.num_nodes, job.node_rank));
        assert_eq!(nodes("p"), Ok((1, 0)));
        assert_eq!(nodes("--nnodes 1:1 p"), Ok((1, 0)));
        let two = "--nnodes 2 --master-addr h --master-port 5";
        assert_eq!(nodes(&format!("{two} --node-rank 1 p")), Ok((2, 1)));
        assert!(nodes(&format!("{two} --node-rank 2 p")).is_err());
        let default = job("--nnodes 2 --master-addr h --log-dir l p").unwrap();
        assert_eq!(
            (default.master_port, default.run_id.as_str()),
            (Some(29500), "none")
        );
        assert_eq!(
            default.output.log_dir,
            Some("l/none/node_0/attempt_0".into())
        );
        for line in ["--nnodes 0 p", "--nnodes x p", "--node-rank 1 p"] {
            assert!(nodes(line).is_err(), "{line}");
        }
        assert_eq!(job("--max-restarts 3 p").unwrap().max_restarts, 3);
    }

    #[test]
    fn the_number_of_ranks_is_a_number_or_a_keyword() {
        assert_eq!(job("--nproc-per-node 4 p").unwrap().nproc, 4);
        assert!(job("--nproc-per-node cpu p").unwrap().nproc >= 1);
        assert!(job("--nproc-per-node auto p").unwrap().nproc >= 1);
        assert!(job("--nproc-per-node 0 p").is_err());
        assert!(job("--nproc-per-node 1000000000000000000 p").is_err());
        assert!(job("--nproc-per-node many p").is_err());
        assert!(job("--nproc-per-node 2").is_err());
    }

    #[test]
    fn streams_are_redirected_and_shown_as_in_torchrun() {
        let output = job("-r 3 -t 0:1 --log-dir l p").unwrap().output;
        assert_eq!(
            (output.redirects.to_string(), output.tee.to_string()),
            ("3".into(), "0:1".into())
        );
        assert_eq!(job("--log-dir /dev/null p").unwrap().output.log_dir, None);
        assert_eq!(
            job("--local-ranks-filter= p").unwrap().output.console_ranks,
            None
        );
    }

    #[test]
    fn signals_are_named_as_in_torchrun() {
        let signals =
            |names: &str| job(&format!("--signals-to-handle {names} p")).map(|job| job.signals);
        assert_eq!(signals("SIGTERM,SIGUSR1"), Ok(vec![15, 10]));
        assert!(signals("USR1").is_err());
    }
}
