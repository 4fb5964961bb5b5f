//! torchrun's options, spelled with dashes or underscores, and the job that they describe.
//!
//! Options that make no difference here are accepted and ignored. Options that are not supported are rejected by
//! name.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use clap::Args;
use trainyard_launcher::{Console, Job};

use super::rdzv::{ElasticArgs, RdzvArgs};
use crate::failure::Failure;

/// torchrun's options.
#[derive(Debug, Args)]
pub struct Torchrun {
    /// Number of ranks per node: a number, `cpu`, `gpu`, or `auto` (GPUs if there are any, else cores)
    #[arg(long, alias = "nproc_per_node", value_name = "N", default_value = "1")]
    nproc_per_node: String,
    /// Run on this node only, with a free MASTER_PORT (this is the default)
    #[arg(long)]
    standalone: bool,
    #[command(flatten)]
    rdzv: RdzvArgs,
    /// Number of restarts after failures
    #[arg(long, alias = "max_restarts", value_name = "N", default_value_t = 0)]
    max_restarts: usize,
    /// Address of rank 0, with --rdzv-backend static (MASTER_ADDR)
    #[arg(
        long,
        alias = "master_addr",
        value_name = "HOST",
        default_value = "127.0.0.1"
    )]
    master_addr: String,
    /// Port on that address (MASTER_PORT); a free one by default
    #[arg(long, alias = "master_port", value_name = "PORT")]
    master_port: Option<u16>,
    /// Ignored, accepted for compatibility with torchrun: exits of ranks are noticed immediately
    #[arg(long, alias = "monitor_interval", value_name = "SECONDS")]
    monitor_interval: Option<f64>,
    /// Ignored, accepted for compatibility with torchrun: ranks are always new processes
    #[arg(long, alias = "start_method", value_name = "METHOD")]
    start_method: Option<String>,
    /// Role of the ranks (ROLE_NAME)
    #[arg(long, value_name = "NAME", default_value = "default")]
    role: String,
    /// Also write the output of ranks to DIR/ID/attempt_0/RANK/{stdout,stderr}.log; in elastic runs to
    /// DIR/ID/epoch_E/node_N/RANK/
    #[arg(long, alias = "log_dir", value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Streams to write to log files only: 0 (none) or 3 (both; needs --log-dir)
    #[arg(short, long, value_name = "0|3", default_value = "0")]
    redirects: String,
    /// Ignored, accepted for compatibility with torchrun: with --log-dir output goes to the console and to files
    #[arg(short, long, value_name = "0..3")]
    tee: Option<String>,
    /// Show only these local ranks on the console, such as `0,1`
    #[arg(
        long,
        alias = "local_ranks_filter",
        value_name = "RANKS",
        value_delimiter = ','
    )]
    local_ranks_filter: Option<Vec<usize>>,
    /// Grace period in seconds between SIGTERM and SIGKILL when this program gets a signal, in which ranks can save a
    /// checkpoint; after a failure at most 2
    #[arg(
        long,
        alias = "shutdown_timeout",
        value_name = "SECONDS",
        default_value_t = 30
    )]
    shutdown_timeout: u64,
    /// Seconds without progress after which a rank that starts, saves or evaluates counts as hung and is killed; for
    /// training steps the limit is learned: 5 s or three times the p99 step time, whichever is longer. 0 turns hang
    /// detection off
    #[arg(
        long,
        alias = "hang_timeout",
        value_name = "SECONDS",
        default_value_t = 1800
    )]
    hang_timeout: u64,
    /// Run PROGRAM as a Python module, like `python -m`
    #[arg(short, long)]
    module: bool,
    /// Execute PROGRAM directly even if its name ends in .py
    #[arg(long, alias = "no_python", conflicts_with = "module")]
    no_python: bool,
    /// The program and its arguments; a name that ends in .py is run with `python3 -u`
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
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
            (job.num_nodes, job.node_rank) = self.nodes(job.master_port)?;
        }
        job.max_restarts = self.max_restarts;
        let id = self.rdzv.id(elastic.as_ref())?;
        job.run_id = id.map_or_else(new_run_id, str::to_owned);
        job.role = self.role.clone();
        job.grace = Duration::from_secs(self.shutdown_timeout);
        let hang_timeout = Some(self.hang_timeout).filter(|seconds| *seconds > 0);
        job.hang_timeout = hang_timeout.map(Duration::from_secs);
        job.output.console_ranks = self.local_ranks_filter.clone();
        job.output.log_dir = self.attempt_dir(&job);
        if self.redirects == "3" {
            job.output.console = Console::Silent;
        }
        Ok(job)
    }

    /// The directory for the log files of this attempt, if there are any.
    pub fn attempt_dir(&self, job: &Job) -> Option<PathBuf> {
        let attempt = format!("attempt_{}", job.restart_count);
        let dir = self.log_dir.as_ref()?;
        Some(dir.join(&job.run_id).join(attempt))
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
        self.log_dir.as_deref()
    }

    /// The number of nodes, and the rank of this node.
    fn nodes(&self, master_port: Option<u16>) -> Result<(usize, usize), Failure> {
        let (num_nodes, node_rank) = self.rdzv.static_nodes()?;
        if num_nodes > 1 && master_port.is_none() {
            let message =
                format!("--nnodes {num_nodes} needs an address and a port that all nodes know");
            let hint = "add --rdzv-backend server --rdzv-endpoint HOST:PORT, \
                        or --master-addr HOST --master-port PORT";
            return Err(Failure::usage(message).hint(hint));
        }
        Ok((num_nodes, node_rank))
    }

    fn reject_unsupported(&self) -> Result<(), Failure> {
        let reject = |option: &str, value: &str, hint: &str| {
            let message = format!("{option} {value} is not supported");
            Err(Failure::usage(message).hint(hint))
        };
        match (self.redirects.as_str(), &self.log_dir) {
            ("0", _) | ("3", Some(_)) => Ok(()),
            ("3", None) => Err(
                Failure::usage("--redirects 3 needs a directory for the log files")
                    .hint("add --log-dir DIR"),
            ),
            _ => reject("--redirects", &self.redirects, "use 0 or 3"),
        }
    }

    /// The command that every rank executes.
    fn command(&self) -> Vec<OsString> {
        let is_script = self
            .program
            .first()
            .is_some_and(|program| Path::new(program).extension().is_some_and(|e| e == "py"));
        let python: &[&str] = match (self.module, is_script && !self.no_python) {
            (true, _) => &["python3", "-u", "-m"],
            (false, true) => &["python3", "-u"],
            (false, false) => &[],
        };
        let python = python.iter().map(OsString::from);
        python.chain(self.program.iter().cloned()).collect()
    }

    /// `MASTER_ADDR` and `MASTER_PORT`; `--standalone` means a free port on this node.
    fn master(&self) -> Result<(String, Option<u16>), Failure> {
        if self.standalone {
            return Ok(("127.0.0.1".to_owned(), None));
        }
        let given = (self.master_addr.clone(), self.master_port);
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

/// The number of ranks on this node.
/// More processes than any node has GPUs or cores for: a larger number is a mistake.
const MAX_NPROC: usize = 4096;

fn nproc(value: &str) -> Result<usize, Failure> {
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    let gpus = num_gpus();
    match value {
        "cpu" => Ok(cores()),
        "auto" if gpus == 0 => Ok(cores()),
        "auto" => Ok(gpus),
        "gpu" if gpus == 0 => Err(Failure::usage("--nproc-per-node gpu: this node has no GPU")
            .hint("use a number, `cpu` or `auto`")),
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

/// Counts the GPU devices of the kernel, because querying CUDA would mean loading it.
fn num_gpus() -> usize {
    let is_gpu = |name: &str| {
        name.strip_prefix("nvidia")
            .is_some_and(|number| number.parse::<usize>().is_ok())
    };
    let devices = fs::read_dir("/dev").into_iter().flatten().flatten();
    devices
        .filter(|device| device.file_name().to_str().is_some_and(is_gpu))
        .count()
}

/// A name that no other job on this node has.
fn new_run_id() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let seconds = now.map_or(0, |now| now.as_secs());
    format!("{seconds}-{}", std::process::id())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        torchrun: Torchrun,
    }

    fn job(line: &str) -> Result<Job, String> {
        let args = ["run"].into_iter().chain(line.split_whitespace());
        let cli = Cli::try_parse_from(args).map_err(|error| error.to_string())?;
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
        let error = job("--redirects 1 --log-dir l p").unwrap_err();
        assert!(error.contains("--redirects"), "{error}");
        assert!(error.contains("not supported"), "{error}");
        assert!(error.contains("\nhint: "), "{error}");
    }

    #[test]
    fn static_nodes_have_ranks_and_need_a_port() {
        let nodes = |line: &str| job(line).map(|job| (job.num_nodes, job.node_rank));
        assert_eq!(nodes("p"), Ok((1, 0)));
        assert_eq!(nodes("--nnodes 1:1 p"), Ok((1, 0)));
        let two = "--nnodes 2 --master-addr h --master-port 5";
        assert_eq!(nodes(&format!("{two} --node-rank 1 p")), Ok((2, 1)));
        assert!(nodes(&format!("{two} --node-rank 2 p")).is_err());
        for line in [
            "--nnodes 2 p",
            "--nnodes 0 p",
            "--nnodes x p",
            "--node-rank 1 p",
        ] {
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
    fn redirected_output_stays_off_the_console() {
        let job = job("-r 3 --log-dir l p").unwrap();
        assert_eq!(job.output.console, Console::Silent);
        assert!(
            super::tests::job("-r 3 p")
                .unwrap_err()
                .contains("--log-dir")
        );
    }
}
