//! `trainyard run`: launches the ranks of a job on this node, as torchrun does.

use std::process::ExitCode;

use clap::Args;
use trainyard_launcher::{ExitStatus, Job, Outcome, launch, launch_served};

use super::elastic;
use super::replica_args::ReplicaArgs;
use super::server_args::ServerArgs;
use super::telemetry_args::TelemetryArgs;
use super::torchrun::Torchrun;
use super::watch::Watch;
use crate::failure::Failure;
use crate::log;

/// Launch a distributed job: a replacement for torchrun
///
/// Accepts torchrun's options and sets torchrun's environment variables, so programs written for torchrun run
/// unchanged. Every line of output is prefixed with its rank. When a rank fails, the other ranks are stopped, the
/// failed rank is reported first, and its exit code (128 plus the signal, if a signal killed it) becomes the exit
/// code of this program. With --max-restarts N the ranks are restarted up to N times and resume from in-memory
/// checkpoints, which this program keeps across restarts.
///
/// With --servers N the ranks are workers that push gradients to parameter servers, and do not wait for each other.
///
/// With --rdzv-backend server or etcd and --rdzv-endpoint the run is elastic: nodes discover each other, and a run
/// with --nnodes MIN:MAX continues when nodes are lost or join.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard run --standalone --nproc-per-node 2 -- trainyard train configs/llama-tiny.toml\n  \
    trainyard run --nproc-per-node auto train.py --lr 3e-4\n  \
    trainyard run --standalone --nproc-per-node 2 --max-restarts 3 -- \\\n    \
      trainyard train configs/llama-tiny.toml --checkpoint.memory_interval 10\n  \
    trainyard run --servers 1 --nproc-per-node 4 -- \\\n    \
      trainyard train configs/llama-tiny.toml --parameter_server.staleness 4\n  \
    trainyard run --nnodes 1:4 --nproc-per-node 8 --rdzv-id llama7 --rdzv-backend server \\\n    \
      --rdzv-endpoint 10.0.0.1:29400 --run-secret-file llama7.secret --max-restarts 3 -- \\\n    \
      trainyard train configs/llama3-8b.toml --checkpoint.memory_interval 10")]
#[command(args_override_self = true)]
pub struct Run {
    #[command(flatten)]
    torchrun: Torchrun,
    #[command(flatten)]
    replicas: ReplicaArgs,
    #[command(flatten)]
    servers: ServerArgs,
    #[command(flatten)]
    telemetry: TelemetryArgs,
    /// Observe PyTorch scripts from inside: steps, collectives in flight and Python lines, for progress, metrics and hang
    /// detection. The scripts need no change
    #[arg(long, help_heading = "PyTorch scripts")]
    watch: bool,
}

impl Run {
    /// Runs the job until all ranks have exited.
    pub fn execute(mut self) -> Result<ExitCode, Failure> {
        self.torchrun.ensure_log_dir()?;
        let mut job = self.torchrun.job()?;
        let _telemetry = self.telemetry.start(&mut job)?;
        let watch = self.watch.then(|| Watch::install(&mut job)).transpose();
        // Must live across restarts: the ranks import it.
        let _watch = watch.map_err(|error| Failure::new(format!("--watch: {error}")))?;
        if self.servers.is_served() {
            log::to_stderr("warn");
            return self.launch_served(&job);
        }
        match self.torchrun.elastic_args()? {
            Some(elastic) => {
                log::to_stderr("warn,trainyard_elastic=info");
                let log_dir = self.torchrun.log_dir().map(Into::into);
                elastic::run(job, elastic, &self.replicas, log_dir)
            }
            None => {
                log::to_stderr("warn");
                self.launch(job)
            }
        }
    }

    /// Launches parameter servers and workers. Servers that restart resume from in-memory checkpoints.
    fn launch_served(self, job: &Job) -> Result<ExitCode, Failure> {
        if self.torchrun.elastic_args()?.is_some() {
            let message = "workers join parameter servers without a rendezvous";
            return Err(Failure::usage(message).hint("omit the --rdzv options"));
        }
        let mut run = self.servers.served_run(job, self.replicas.secret_file())?;
        let _replicas = run.start_replica_server(&self.replicas);
        let outcome = launch_served(&run.job).map_err(|error| elastic::launch_failure(&error))?;
        match outcome.report() {
            None => Ok(ExitCode::SUCCESS),
            Some(report) => Err(Failure::new(report).with_code(outcome.exit_code())),
        }
    }

    /// Without a rendezvous: launches the ranks of this node, and restarts them as often as allowed.
    fn launch(self, mut job: Job) -> Result<ExitCode, Failure> {
        // Must live across restarts: the ranks restore their state from it.
        let _replicas = self.replicas.start(&mut job)?;
        let mut outcome = launch(&job).map_err(|error| elastic::launch_failure(&error))?;
        while job.may_restart(&outcome) {
            job.restart_count += 1;
            job.faults.extend(outcome.report());
            job.output.log_dir = self.torchrun.attempt_dir(&job);
            eprintln!(
                "warning: {}\nrestarting the ranks: restart {} of {}",
                outcome.report().unwrap_or_default(),
                job.restart_count,
                job.max_restarts
            );
            outcome = launch(&job).map_err(|error| elastic::launch_failure(&error))?;
        }
        let Some(report) = outcome.report() else {
            return Ok(ExitCode::SUCCESS);
        };
        outcome.forward_recorded_error();
        let failure = Failure::new(report).with_code(outcome.exit_code());
        Err(match hint(&outcome, job.output.log_dir.is_some()) {
            Some(hint) => failure.hint(hint),
            None => failure,
        })
    }
}

/// What to do next, given how the first rank failed.
fn hint(outcome: &Outcome, has_logs: bool) -> Option<&'static str> {
    const SIGKILL: i32 = 9;
    let first = outcome.first_failure?;
    let first = outcome.exits.iter().find(|exit| exit.rank == first)?;
    match first.status {
        ExitStatus::Signaled(SIGKILL) if first.hang_reason.is_some() => {
            Some("if the rank needs more time outside of steps, raise --hang-timeout SECONDS")
        }
        ExitStatus::Signaled(SIGKILL) if first.is_oom => Some(
            "lower training.local_batch_size, shard over more ranks, or raise the memory limit",
        ),
        _ if !has_logs => Some("--log-dir DIR writes the complete output of every rank to files"),
        _ => None,
    }
}
