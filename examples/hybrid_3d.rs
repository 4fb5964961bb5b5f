//! 3D parallelism with a custom training loop: pipeline parallelism (`pp`), FSDP (`dp_shard`) and tensor
//! parallelism (`tp`) on one mesh, set up from a config.
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 8 -- target/release/examples/hybrid_3d
//! ```
//!
//! On fewer ranks the mesh is smaller, and the losses are the same.

use trainyard::data::{Sampler, step_batches};
use trainyard::train::{TrainSpec, Trainer, build};
use trainyard::{Axis, Config, Mesh, Result};

const STEPS: u64 = 30;

fn main() -> Result<()> {
    let num_ranks = std::env::var("WORLD_SIZE").map_or(1, |n| n.parse().unwrap_or(1));
    let degree = |at_least: usize| if num_ranks >= at_least { 2 } else { 1 };
    let (pp, tp, shard) = (degree(2), degree(4), degree(8));
    let spec = TrainSpec::from(&config(pp, shard, tp)?);

    // init_device_mesh("cpu", (pp, shard, tp), mesh_dim_names=("pp", "dp_shard", "tp"))
    let world = trainyard::init_mesh(&[(Axis::Pp, pp), (Axis::DpShard, shard), (Axis::Tp, tp)])?;
    let mut trainer = Trainer::new(&spec, &world, world.device().into())?;
    if world.rank() == 0 {
        let mesh: &Mesh = world.mesh();
        println!(
            "mesh {mesh}, {} parameter tensors on rank 0",
            trainer.parameters().len()
        );
    }

    let source = build::source(&spec, build::Phase::Training)?;
    let batching = *trainer.batching();
    let sampler = Sampler::new(batching.global, batching.ranks, batching.num_microbatches)?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let batches = step_batches(
            &*source,
            &sampler,
            step,
            trainer.data_group().index(),
            world.device(),
        )?;
        let outcome = trainer.step(&batches)?;
        losses.push(trainer.global_loss(&outcome.local_loss)?);
        if world.rank() == 0 {
            println!("step {step} loss {:.6}", losses[losses.len() - 1]);
        }
    }
    if losses[losses.len() - 1] > 0.9 * losses[0] {
        eprintln!("the loss did not decrease: {losses:?}");
        std::process::exit(1);
    }
    Ok(world.world_group()?.barrier()?.wait()?)
}

fn config(pp: usize, shard: usize, tp: usize) -> Result<Config> {
    let text = format!(
        "[model]
        flavor = 'tiny'
        vocab_size = 256
        [training]
        seq_len = 64
        local_batch_size = 1
        global_batch_size = 8
        steps = {STEPS}
        [optimizer]
        lr = 3e-3
        [parallelism]
        pipeline_parallel_degree = {pp}
        pipeline_parallel_schedule = '1F1B'
        data_parallel_shard_degree = {shard}
        tensor_parallel_degree = {tp}"
    );
    Ok(Config::parse(&text, &[])?)
}
