//! `bench operators`: what every operator of a model costs on this machine, with all its ranks at work.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::Serialize;
use trainyard_config::Config;
use trainyard_data::{Batch, Sampler, step_batches};
use trainyard_elastic::Console;
use trainyard_mesh::{Axis, Mesh};
use trainyard_nn::Place;
use trainyard_torch::{Backend, Group, Rendezvous, World, operators};
use trainyard_trace::{Calls, Ledger, Operator, calls};
use trainyard_train::{Trainer, build};

use crate::error::Result;
use crate::ranks::{join_mesh, run_locally};

/// Arguments of `bench operators`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The config whose model is run, by every rank alone.
    config: PathBuf,
    /// Number of ranks to start here.
    #[arg(long, default_value_t = 2)]
    nproc: usize,
    /// Steps to time at each size.
    #[arg(long, default_value_t = 4)]
    steps: usize,
}

/// Arguments of one rank.
#[derive(Debug, clap::Args)]
pub struct RankArguments {
    config: PathBuf,
    #[arg(long)]
    steps: usize,
}

/// What one size took.
#[derive(Debug, Serialize)]
struct Row {
    batch: usize,
    num_microbatches: usize,
    seq_len: usize,
    step_seconds: f64,
    num_steps: u64,
    operators: Vec<Calls>,
}

/// Starts the ranks; rank 0 prints a line of JSON for every size.
pub fn execute(arguments: Arguments, overrides: &[String]) -> Result<ExitCode> {
    let steps = arguments.steps.max(1).to_string();
    let mut args: Vec<OsString> = vec!["bench-operators-rank".into(), arguments.config.into()];
    args.extend(["--steps".into(), steps.into()]);
    args.extend(overrides.iter().map(OsString::from));
    run_locally(arguments.nproc, &args, Console::Plain)?;
    Ok(ExitCode::SUCCESS)
}

/// Steps alone, at the same time as the others.
pub fn execute_rank(arguments: RankArguments, overrides: &[String]) -> Result<ExitCode> {
    let at = Rendezvous::from_env(Duration::from_secs(300))?;
    let mesh = Mesh::new(&[(Axis::DpReplicate, at.world_size)])?;
    let world = join_mesh(mesh, Backend::Gloo, &at, Ledger::new)?;
    let everyone = world.everyone()?;
    let config = Config::load(&arguments.config, overrides)?;
    let sizes = sizes(&config).into_iter();
    let sizes = sizes.map(|size| Size::new(&config, size, at.rank));
    let mut sizes = sizes.collect::<Result<Vec<_>>>()?;
    // In turns, because machines are faster at one time than at another.
    for _ in 0..arguments.steps {
        for size in &mut sizes {
            size.measure(&everyone)?;
        }
    }
    for size in sizes.iter().filter(|_| at.rank == 0) {
        println!("{}", serde_json::to_string(&size.row()).unwrap_or_default());
    }
    everyone.barrier()?.wait()?;
    Ok(ExitCode::SUCCESS)
}

/// Samples of a pass, tokens of a sample, and passes of a step.
type Shape = (usize, usize, usize);

/// The batch as it is, and less of it in either direction: a line needs several points. Single samples follow
/// each other, as a pipeline's do.
fn sizes(config: &Config) -> Vec<Shape> {
    let (batch, seq_len) = (config.training.local_batch_size, config.training.seq_len);
    let mut sizes = vec![
        (batch, seq_len, 1),
        (batch, (seq_len / 2).max(1), 1),
        ((batch / 2).max(1), seq_len, 1),
        (1, seq_len, batch),
    ];
    // A batch of one is its own half.
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

const WARMUP: usize = 2;

/// Steps of one size.
struct Size {
    config: Config,
    trainer: Trainer,
    batches: Vec<Batch>,
    /// Of every step, without anybody looking.
    seconds: Vec<f64>,
    seen: Vec<Operator>,
}

impl Size {
    fn new(config: &Config, shape: Shape, rank: usize) -> Result<Size> {
        let (batch, seq_len, num_microbatches) = shape;
        let mut config = config.clone();
        config.training.local_batch_size = batch;
        config.training.global_batch_size = Some(batch * num_microbatches);
        config.training.seq_len = seq_len;
        let alone = World::alone(Ledger::new(rank))?;
        let mut trainer = Trainer::new(&config, &alone, Place::Cpu)?;
        let batches = batches(&config, num_microbatches)?;
        for _ in 0..WARMUP {
            trainer.step(&batches)?;
        }
        Ok(Size {
            config,
            trainer,
            batches,
            seconds: Vec::new(),
            seen: Vec::new(),
        })
    }

    /// One step by the clock, and one by its operators.
    fn measure(&mut self, everyone: &Group) -> Result<()> {
        everyone.barrier()?.wait()?;
        let start = Instant::now();
        self.trainer.step(&self.batches)?;
        self.seconds.push(start.elapsed().as_secs_f64());
        everyone.barrier()?.wait()?;
        let (stepped, seen) = operators::record(|| self.trainer.step(&self.batches))?;
        stepped?;
        self.seen.extend(seen);
        Ok(())
    }

    fn row(&self) -> Row {
        Row {
            batch: self.config.training.local_batch_size,
            num_microbatches: self.batches.len(),
            seq_len: self.config.training.seq_len,
            step_seconds: self.seconds.iter().sum::<f64>() / self.seconds.len().max(1) as f64,
            num_steps: self.seconds.len() as u64,
            operators: calls(&self.seen),
        }
    }
}

fn batches(config: &Config, num_microbatches: usize) -> Result<Vec<Batch>> {
    let source = build::source(config, false)?;
    let batch = config.training.local_batch_size * num_microbatches;
    let sampler = Sampler::new(batch, 1, num_microbatches)?;
    Ok(step_batches(&*source, &sampler, 0, 0)?)
}
