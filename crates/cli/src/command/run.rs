//! `trainyard run`: torchrun's job, on this machine, alone or as one of several.

use std::process::ExitCode;

use clap::Args;
use trainyard_elastic::{How, Job, Outcome, launch};

use super::elastic;
use super::holding::Holding;
use super::torchrun::Torchrun;
use crate::failure::Failure;
use crate::log;

/// Start N ranks of a program, watch them, and end them together
///
/// Takes torchrun's options and gives the ranks torchrun's environment, so programs written for
/// torchrun run unchanged. Every line of output carries its rank. The first rank that fails ends
/// the others and is named first; its exit code (128 plus the signal, if killed) becomes this
/// program's. With --max-restarts the ranks are started again first, and go on from the copies of
/// their state that this program holds in memory.
///
/// With --rdzv-backend c10d or etcd and --rdzv-endpoint, machines find each other, and a run of
/// --nnodes MIN:MAX goes on when some of them are lost and when some come back.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard run --standalone --nproc-per-node 2 -- trainyard train configs/llama-tiny.toml\n  \
    trainyard run --nproc-per-node auto train.py --lr 3e-4\n  \
    trainyard run --standalone --nproc-per-node 2 --max-restarts 3 -- \\\n    \
      trainyard train configs/llama-tiny.toml --checkpoint.memory_interval 10\n  \
    trainyard run --nnodes 1:4 --nproc-per-node 8 --rdzv-id llama7 --rdzv-backend c10d \\\n    \
      --rdzv-endpoint 10.0.0.1:29400 --run-secret-file llama7.secret --max-restarts 3 -- \\\n    \
      trainyard train configs/llama3-8b.toml --checkpoint.memory_interval 10")]
pub struct Run {
    #[command(flatten)]
    torchrun: Torchrun,
    #[command(flatten)]
    holding: Holding,
}

impl Run {
    /// Runs the job to its end.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let job = self.torchrun.job()?;
        match self.torchrun.meeting()? {
            Some(meeting) => {
                log::to_stderr("warn,trainyard_agent=info");
                let log_dir = self.torchrun.log_dir().map(Into::into);
                elastic::run(job, meeting, &self.holding, log_dir)
            }
            None => {
                log::to_stderr("warn");
                self.launch(job)
            }
        }
    }

    /// Without a rendezvous: this machine's ranks, again as often as allowed.
    fn launch(self, mut job: Job) -> Result<ExitCode, Failure> {
        // Lives across restarts: that is what it is for.
        let _held = self.holding.start(&mut job)?;
        let mut outcome = launch(&job).map_err(|error| elastic::launch_refusal(&error))?;
        while job.may_restart(&outcome) {
            job.restart_count += 1;
            job.faults.extend(outcome.report());
            job.output.log_dir = self.torchrun.attempt_folder(&job);
            eprintln!(
                "warning: {}\nstarting again: restart {} of {}",
                outcome.report().unwrap_or_default(),
                job.restart_count,
                job.max_restarts
            );
            outcome = launch(&job).map_err(|error| elastic::launch_refusal(&error))?;
        }
        let Some(report) = outcome.report() else {
            return Ok(ExitCode::SUCCESS);
        };
        let failure = Failure::new(report).with_code(outcome.exit_code());
        Err(match hint(&outcome, job.output.log_dir.is_some()) {
            Some(hint) => failure.hint(hint),
            None => failure,
        })
    }
}

/// Where to look next, given how the first rank failed.
fn hint(outcome: &Outcome, has_logs: bool) -> Option<&'static str> {
    const SIGKILL: i32 = 9;
    let first = outcome.first_failure?;
    let first = outcome.ends.iter().find(|end| end.rank == first)?;
    match first.how {
        How::Killed(SIGKILL) if first.hung.is_some() => {
            Some("a rank that needs longer between steps has it with --hang-timeout SECONDS")
        }
        How::Killed(SIGKILL) => {
            Some("a SIGKILL that nobody sent is often the kernel's when memory is out: see dmesg")
        }
        _ if !has_logs => Some("--log-dir FOLDER keeps every rank's whole output in files"),
        _ => None,
    }
}
