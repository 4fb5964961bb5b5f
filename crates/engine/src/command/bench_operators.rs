//! `trainyard bench operators`: time of every operator of a model on this host, while all local ranks compute.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::Serialize;
use trainyard_config::Config;
use trainyard_data::{Batch, Sampler, step_batches};
use trainyard_launcher::Console;
use trainyard_mesh::{Axis, Mesh};
use trainyard_nn::Device;
use trainyard_torch::{Backend, Group, Rendezvous, World, operators};
use trainyard_trace::{Calls, Ledger, Operator, calls};
use trainyard_train::{TrainSpec, Trainer, build};

use crate::configs::Configs;
use crate::error::Result;
use crate::ranks::{join_mesh, run_locally};

/// Measure the time of every operator of a model
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Path of the config file; every rank runs its model without communication
    config: PathBuf,
    /// Number of local ranks
    #[arg(long, default_value_t = 2)]
    nproc: usize,
    /// Steps to measure per size
    #[arg(long, default_value_t = 4)]
    steps: usize,
}

/// Arguments of one rank of `bench operators`.
#[derive(Debug, clap::Args)]
pub struct RankArguments {
    config: PathBuf,
    #[arg(long)]
    steps: usize,
}

/// The measurements of one size.
#[derive(Debug, Serialize)]
struct Row {
    batch: usize,
    num_microbatches: usize,
    seq_len: usize,
    step_seconds: f64,
    num_steps: u64,
    operators: Vec<Calls>,
}

/// Starts the ranks; rank 0 prints a JSON line for every size.
pub fn execute(arguments: Arguments, overrides: &[String]) -> Result<ExitCode> {
    let steps = arguments.steps.max(1).to_string();
    let mut args: Vec<OsString> = vec!["bench-operators-rank".into(), arguments.config.into()];
    args.extend(["--steps".into(), steps.into()]);
    args.extend(overrides.iter().map(OsString::from));
    run_locally(arguments.nproc, &args, Console::Plain)?;
    Ok(ExitCode::SUCCESS)
}

/// Measures on this rank, at the same time as the other ranks.
pub fn execute_rank(arguments: RankArguments, configs: &Configs) -> Result<ExitCode> {
    let at = Rendezvous::from_env(Duration::from_secs(300))?;
    let mesh = Mesh::new(&[(Axis::DpReplicate, at.world_size)])?;
    let world = join_mesh(mesh, Backend::Gloo, &at, Ledger::new)?;
    let world_group = world.world_group()?;
    let spec = configs.load(&arguments.config)?;
    let sizes = sizes(&spec).into_iter();
    let sizes = sizes.map(|size| BenchCase::new(&spec, size, at.rank));
    let mut cases = sizes.collect::<Result<Vec<_>>>()?;
    // Sizes alternate, because the speed of a host varies over time.
    for _ in 0..arguments.steps {
        for case in &mut cases {
            case.measure(&world_group)?;
        }
    }
    for case in cases.iter().filter(|_| at.rank == 0) {
        println!("{}", serde_json::to_string(&case.row()).unwrap_or_default());
    }
    world_group.barrier()?.wait()?;
    Ok(ExitCode::SUCCESS)
}

/// Samples per micro-batch, tokens per sample, and micro-batches per step.
type Shape = (usize, usize, usize);

/// The batch of the config, half of it in either dimension (a linear fit needs several points), and single
/// samples as the micro-batches of a pipeline.
fn sizes(config: &Config) -> Vec<Shape> {
    let (batch, seq_len) = (config.training.local_batch_size, config.training.seq_len);
    let mut sizes = vec![
        (batch, seq_len, 1),
        (batch, (seq_len / 2).max(1), 1),
        ((batch / 2).max(1), seq_len, 1),
        (1, seq_len, batch),
    ];
    // Half of a batch of one is one.
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

const WARMUP: usize = 2;

/// The trainer and measurements of one size.
struct BenchCase {
    spec: TrainSpec,
    trainer: Trainer,
    batches: Vec<Batch>,
    /// Time of every step, without operator recording.
    seconds: Vec<f64>,
    operators: Vec<Operator>,
}

impl BenchCase {
    fn new(spec: &TrainSpec, shape: Shape, rank: usize) -> Result<BenchCase> {
        let (batch, seq_len, num_microbatches) = shape;
        let mut config = Config::clone(spec);
        config.training.local_batch_size = batch;
        config.training.global_batch_size = Some(batch * num_microbatches);
        config.training.seq_len = seq_len;
        let spec = spec.with_config(config);
        let alone = World::single_rank(Ledger::new(rank))?;
        let mut trainer = Trainer::new(&spec, &alone, Device::Cpu)?;
        let batches = batches(&spec, num_microbatches)?;
        for _ in 0..WARMUP {
            trainer.step(&batches)?;
        }
        Ok(BenchCase {
            spec,
            trainer,
            batches,
            seconds: Vec::new(),
            operators: Vec::new(),
        })
    }

    /// Measures the time of one step, and the operators of another one.
    fn measure(&mut self, world_group: &Group) -> Result<()> {
        world_group.barrier()?.wait()?;
        let start = Instant::now();
        self.trainer.step(&self.batches)?;
        self.seconds.push(start.elapsed().as_secs_f64());
        world_group.barrier()?.wait()?;
        let (stepped, operators) = operators::record(|| self.trainer.step(&self.batches))?;
        stepped?;
        self.operators.extend(operators);
        Ok(())
    }

    fn row(&self) -> Row {
        Row {
            batch: self.spec.training.local_batch_size,
            num_microbatches: self.batches.len(),
            seq_len: self.spec.training.seq_len,
            step_seconds: self.seconds.iter().sum::<f64>() / self.seconds.len().max(1) as f64,
            num_steps: self.seconds.len() as u64,
            operators: calls(&self.operators),
        }
    }
}

fn batches(spec: &TrainSpec, num_microbatches: usize) -> Result<Vec<Batch>> {
    let source = build::source(spec, build::Phase::Training)?;
    let batch = spec.training.local_batch_size * num_microbatches;
    let sampler = Sampler::new(batch, 1, num_microbatches)?;
    Ok(step_batches(&*source, &sampler, 0, 0, tch::Device::Cpu)?)
}
