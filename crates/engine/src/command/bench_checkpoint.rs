//! `bench-checkpoint`: times saving and loading a sharded model and its optimizer, for comparison with
//! PyTorch.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::Serialize;
use trainyard_checkpoint::{TrainState, step_dir, store};
use trainyard_config::Config;
use trainyard_data::{Sampler, step_batches};
use trainyard_torch::{Backend, Group, Rendezvous};
use trainyard_trace::Ledger;
use trainyard_train::checkpoint::{self, Destination, Saver};
use trainyard_train::{Trainer, build};

use crate::error::Result;
use crate::ranks::join_mesh;

/// Arguments of `bench-checkpoint`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The model: `tiny` or `small`
    #[arg(long, default_value = "small")]
    preset: String,
    /// Number of synchronous and of asynchronous saves
    #[arg(long, default_value_t = 3)]
    repeats: u64,
    /// Directory to save to
    #[arg(long)]
    folder: PathBuf,
}

/// The measured times in seconds, one per repeat.
#[derive(Debug, Default, Serialize)]
struct Line {
    save: Vec<f64>,
    pause: Vec<f64>,
    load: Vec<f64>,
}

/// Measures on all ranks; rank 0 prints a JSON line.
pub fn execute(arguments: Arguments) -> Result<ExitCode> {
    tch::set_num_threads(1);
    let at = Rendezvous::from_env(Duration::from_secs(300))?;
    let config = config(&arguments.preset, at.world_size)?;
    let mesh = config.mesh(at.world_size)?;
    let world = join_mesh(mesh, Backend::auto(), &at, |_| Ledger::new(at.rank))?;
    let world_group = world.world_group()?;
    let mut trainer = Trainer::new(&(&config).into(), &world, world.device().into())?;
    let sampler = Sampler::new(at.world_size, at.world_size, 1)?;
    let source = build::source(&(&config).into(), build::Phase::Training)?;
    // One step allocates the optimizer state.
    trainer.step(&step_batches(
        &*source,
        &sampler,
        0,
        at.rank,
        world.device(),
    )?)?;
    let store = store::open(&arguments.folder)?;
    let mut line = Line::default();
    for repeat in 0..arguments.repeats {
        for is_async in [false, true] {
            let step = 2 * repeat + u64::from(is_async);
            let mut saver = Saver::new(&world)?;
            let destination = Destination {
                store: std::sync::Arc::clone(&store),
                keep: 2,
                is_async,
                is_durable: true,
                owner: None,
            };
            let began = barrier_time(&world_group)?;
            saver.save(&trainer, &world, state(step, at.world_size), &[destination])?;
            let paused = began.elapsed();
            saver.finish();
            let ended = barrier_time(&world_group)?.duration_since(began);
            if is_async {
                line.pause.push(paused.as_secs_f64())
            } else {
                line.save.push(ended.as_secs_f64())
            }
        }
        let folder = step_dir(2 * repeat);
        let began = barrier_time(&world_group)?;
        checkpoint::load_step(std::sync::Arc::clone(&store), &folder, &mut trainer, &world)?;
        let ended = barrier_time(&world_group)?.duration_since(began);
        line.load.push(ended.as_secs_f64());
    }
    if at.rank == 0 {
        println!("{}", serde_json::to_string(&line).unwrap_or_default());
    }
    Ok(ExitCode::SUCCESS)
}

/// The time at which all ranks have reached the barrier.
fn barrier_time(world_group: &Group) -> Result<Instant> {
    world_group.barrier()?.wait()?;
    Ok(Instant::now())
}

fn state(step: u64, world_size: usize) -> TrainState {
    TrainState {
        step,
        samples_seen: step,
        seed: 1,
        world_size,
        config: String::new(),
        extra_state: serde_json::Value::Null,
    }
}

fn config(preset: &str, world_size: usize) -> Result<Config> {
    let text = format!(
        "[model]\nname = \"llama\"\nflavor = \"{preset}\"\n\
         [training]\nlocal_batch_size = 1\nglobal_batch_size = {world_size}\nseq_len = 64\n\
         [parallelism]\ndata_parallel_shard_degree = -1\n"
    );
    Ok(Config::parse(&text, &[])?)
}
