//! torchrun's options, in both spellings, and the job they mean.
//!
//! What makes no difference is accepted and has no effect; what would make one and is not there yet is
//! refused by name.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use clap::Args;
use trainyard_elastic::{Console, Job};

use super::rdzv::{Meeting, Rdzv};
use crate::failure::Failure;

/// torchrun's options.
#[derive(Debug, Args)]
pub struct Torchrun {
    /// How many ranks: a number, `cpu`, `gpu`, or `auto` (GPUs if there are any, else cores)
    #[arg(long, alias = "nproc_per_node", value_name = "N", default_value = "1")]
    nproc_per_node: String,
    /// One machine, with a free port for the ranks to meet at (this is the default)
    #[arg(long)]
    standalone: bool,
    #[command(flatten)]
    rdzv: Rdzv,
    /// How often to start ranks again after a failure
    #[arg(long, alias = "max_restarts", value_name = "N", default_value_t = 0)]
    max_restarts: usize,
    /// Where the ranks meet
    #[arg(
        long,
        alias = "master_addr",
        value_name = "HOST",
        default_value = "127.0.0.1"
    )]
    master_addr: String,
    /// The port they meet at; a free one when not given
    #[arg(long, alias = "master_port", value_name = "PORT")]
    master_port: Option<u16>,
    /// Accepted for torchrun's sake; a rank's end is noticed at once
    #[arg(long, alias = "monitor_interval", value_name = "SECONDS")]
    monitor_interval: Option<f64>,
    /// Accepted for torchrun's sake; ranks are always new processes
    #[arg(long, alias = "start_method", value_name = "METHOD")]
    start_method: Option<String>,
    /// The role of the ranks (ROLE_NAME)
    #[arg(long, value_name = "NAME", default_value = "default")]
    role: String,
    /// Keep output in FOLDER/ID/attempt_0/RANK/{stdout,stderr}.log too
    #[arg(long, alias = "log_dir", value_name = "FOLDER")]
    log_dir: Option<PathBuf>,
    /// Which streams go to files only: 0 (none) or 3 (both; needs --log-dir)
    #[arg(short, long, value_name = "0|3", default_value = "0")]
    redirects: String,
    /// Accepted for torchrun's sake; with --log-dir output goes to console and files
    #[arg(short, long, value_name = "0..3")]
    tee: Option<String>,
    /// Show only these ranks on the console, such as `0,1`
    #[arg(
        long,
        alias = "local_ranks_filter",
        value_name = "RANKS",
        value_delimiter = ','
    )]
    local_ranks_filter: Option<Vec<usize>>,
    /// Seconds that ranks have to save and end when this program is told to end; after a failure they have
    /// at most two
    #[arg(
        long,
        alias = "shutdown_timeout",
        value_name = "SECONDS",
        default_value_t = 30
    )]
    shutdown_timeout: u64,
    /// Seconds after which a rank that does not get on is taken to hang, while it starts, saves or evaluates;
    /// for steps that is learned: 5, or three times what nearly all steps take. 0 looks after nobody
    #[arg(
        long,
        alias = "hang_timeout",
        value_name = "SECONDS",
        default_value_t = 1800
    )]
    hang_timeout: u64,
    /// PROGRAM is the name of a Python module, as in `python -m`
    #[arg(short, long)]
    module: bool,
    /// Run PROGRAM as it is even if its name ends in .py
    #[arg(long, alias = "no_python", conflicts_with = "module")]
    no_python: bool,
    /// The program and its arguments; one that ends in .py is run with `python3 -u`
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
}

impl Torchrun {
    /// The job that the options mean.
    pub fn job(&self) -> Result<Job, Failure> {
        self.refuse_what_is_missing()?;
        let mut command = self.command();
        let mut job = Job::new(command.remove(0), nproc(&self.nproc_per_node)?).args(command);
        (job.master_addr, job.master_port) = self.master()?;
        let meeting = self.meeting()?;
        if meeting.is_none() {
            (job.num_nodes, job.node_rank) = self.nodes(job.master_port)?;
        }
        job.max_restarts = self.max_restarts;
        let id = self.rdzv.id(meeting.as_ref())?;
        job.run_id = id.map_or_else(new_run_id, str::to_owned);
        job.role = self.role.clone();
        job.grace = Duration::from_secs(self.shutdown_timeout);
        let hang_timeout = Some(self.hang_timeout).filter(|seconds| *seconds > 0);
        job.hang_timeout = hang_timeout.map(Duration::from_secs);
        job.output.console_ranks = self.local_ranks_filter.clone();
        job.output.log_dir = self.attempt_folder(&job);
        if self.redirects == "3" {
            job.output.console = Console::Silent;
        }
        Ok(job)
    }

    /// Where the output of this attempt goes, if it goes into files.
    pub fn attempt_folder(&self, job: &Job) -> Option<PathBuf> {
        let attempt = format!("attempt_{}", job.restart_count);
        let folder = self.log_dir.as_ref()?;
        Some(folder.join(&job.run_id).join(attempt))
    }

    /// Where machines meet, unless there is one, or they are started by hand.
    pub fn meeting(&self) -> Result<Option<Meeting>, Failure> {
        match self.standalone {
            true => Ok(None),
            false => self.rdzv.meeting(self.max_restarts),
        }
    }

    /// The folder for output, if it goes into files.
    pub fn log_dir(&self) -> Option<&Path> {
        self.log_dir.as_deref()
    }

    /// How many machines there are, and which this is.
    fn nodes(&self, master_port: Option<u16>) -> Result<(usize, usize), Failure> {
        let (num_nodes, node_rank) = self.rdzv.by_hand()?;
        if num_nodes > 1 && master_port.is_none() {
            let message = format!("--nnodes {num_nodes} needs a port that all machines know");
            let hint = "add --rdzv-backend c10d --rdzv-endpoint HOST:PORT, \
                        or --master-addr HOST --master-port PORT";
            return Err(Failure::usage(message).hint(hint));
        }
        Ok((num_nodes, node_rank))
    }

    fn refuse_what_is_missing(&self) -> Result<(), Failure> {
        let refuse = |option: &str, value: &str, hint: &str| {
            let message = format!("{option} {value} is not supported yet");
            Err(Failure::usage(message).hint(hint))
        };
        match (self.redirects.as_str(), &self.log_dir) {
            ("0", _) | ("3", Some(_)) => Ok(()),
            ("3", None) => Err(Failure::usage("--redirects 3 needs a folder for the files")
                .hint("add --log-dir FOLDER")),
            _ => refuse("--redirects", &self.redirects, "use 0 or 3"),
        }
    }

    /// What a rank executes.
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

    /// The address and port at which ranks meet; `--standalone` means a free port here.
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
                "--rdzv-endpoint {endpoint}: `{port}` is no port"
            ))
            .hint("write HOST:PORT")),
        }
    }
}

/// The number of ranks that a word means on this machine.
fn nproc(word: &str) -> Result<usize, Failure> {
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    let gpus = num_gpus();
    match word {
        "cpu" => Ok(cores()),
        "auto" if gpus == 0 => Ok(cores()),
        "auto" => Ok(gpus),
        "gpu" if gpus == 0 => Err(Failure::usage("--nproc-per-node gpu: there is no GPU here")
            .hint("use a number, `cpu` or `auto`")),
        "gpu" => Ok(gpus),
        number => match number.parse() {
            Ok(nproc) if nproc > 0 => Ok(nproc),
            _ => Err(
                Failure::usage(format!("--nproc-per-node {number} is no number of ranks"))
                    .hint("use a number from 1, `cpu`, `gpu` or `auto`"),
            ),
        },
    }
}

/// The kernel's own count; asking CUDA would mean loading it.
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

/// A name that no other job of this machine has.
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
        let words = ["run"].into_iter().chain(line.split_whitespace());
        let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
        cli.torchrun.job().map_err(|failure| failure.to_string())
    }

    fn command(line: &str) -> Vec<String> {
        let job = job(line).unwrap();
        let words = [job.program.into_os_string()].into_iter().chain(job.args);
        words.map(|word| word.into_string().unwrap()).collect()
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
    fn the_programs_own_options_are_left_alone() {
        let expected = ["train", "--nproc-per-node", "5", "-m", "--", "-x"];
        let line = "--nproc-per-node 2 -- train --nproc-per-node 5 -m -- -x";
        assert_eq!(command(line), expected);
        assert_eq!(command("train --lr 3e-4"), ["train", "--lr", "3e-4"]);
    }

    #[test]
    fn python_runs_what_is_python() {
        assert_eq!(command("a.py --b"), ["python3", "-u", "a.py", "--b"]);
        assert_eq!(
            command("-m pkg.mod x"),
            ["python3", "-u", "-m", "pkg.mod", "x"]
        );
        assert_eq!(command("--no-python a.py"), ["a.py"]);
        assert_eq!(command("./a.sh"), ["./a.sh"]);
    }

    #[test]
    fn ranks_meet_where_they_are_told() {
        let meet = |line: &str| job(line).map(|job| (job.master_addr, job.master_port));
        let local = "127.0.0.1".to_owned();
        assert_eq!(meet("p"), Ok((local.clone(), None)));
        assert_eq!(meet("--master-port 5 p"), Ok((local.clone(), Some(5))));
        assert_eq!(meet("--rdzv-endpoint h:6 p"), Ok(("h".into(), Some(6))));
        assert_eq!(meet("--rdzv-endpoint h:0 p"), Ok(("h".into(), None)));
        let c10d = "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:6 p";
        assert_eq!(meet(c10d), Ok((local.clone(), None)));
        assert_eq!(
            meet("--standalone --rdzv-endpoint h:6 p"),
            Ok((local, None))
        );
        assert!(meet("--rdzv-endpoint h:x p").is_err());
    }

    #[test]
    fn what_is_not_there_yet_is_refused_by_name() {
        let error = job("--redirects 1 --log-dir l p").unwrap_err();
        assert!(error.contains("--redirects"), "{error}");
        assert!(error.contains("not supported yet"), "{error}");
        assert!(error.contains("\nhint: "), "{error}");
    }

    #[test]
    fn machines_are_numbered_and_meet_at_a_port() {
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
    fn a_number_of_ranks_is_a_number_or_a_word() {
        assert_eq!(job("--nproc-per-node 4 p").unwrap().nproc, 4);
        assert!(job("--nproc-per-node cpu p").unwrap().nproc >= 1);
        assert!(job("--nproc-per-node auto p").unwrap().nproc >= 1);
        assert!(job("--nproc-per-node 0 p").is_err());
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
