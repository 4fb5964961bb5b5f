//! Fully sharded data parallelism (FSDP, ZeRO stage 3) with a custom training loop: every rank has a shard
//! of each layer, and a layer is all-gathered only while it computes.
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/fsdp
//! ```
//!
//! Comments show the corresponding PyTorch calls. The parameters of the model are this rank's shards, so
//! the optimizer state is sharded too.

use trainyard::data::{Sampler, SyntheticTokens, step_batches};
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::parallel::{
    DataParallelWrapper, FullyShard, GradSync, Precision, ShardOptions, Strategy,
};
use trainyard::{
    Axis, Builder, Context, Decoder, DecoderConfig, Kind, Model, Module, Purpose, ReduceOp, Result,
};

const STEPS: u64 = 30;
const SEQ_LEN: usize = 64;
const LEARNING_RATE: f64 = 3e-3;

fn main() -> Result<()> {
    // init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    let world = trainyard::init_along(Axis::DpShard)?;
    let model = Decoder::build(
        &DecoderConfig::debug(),
        SEQ_LEN,
        &Builder::new(1)
            .device(world.device().into())
            .compute_kind(Kind::BFloat16),
    )?;

    // fully_shard(model, mp_policy=MixedPrecisionPolicy(bfloat16, reduce_dtype=float32))
    let model = FullyShard::new(
        model,
        &world,
        ShardOptions {
            precision: Precision::bf16(),
            ..ShardOptions::default()
        },
    )?;
    let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());

    let world_group = world.world_group()?;
    let source = SyntheticTokens::new(SEQ_LEN, DecoderConfig::debug().vocab_size, 1)?;
    let sampler = Sampler::new(12, world.size(), 1)?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let batch =
            step_batches(&source, &sampler, step, world.rank(), world.device())?.swap_remove(0);
        let run = model.forward(&batch.inputs, &Context::training(step))?;
        let loss = model.loss(run.output(), &batch.targets)? / batch.num_targets as f64;
        model.backward(run, &loss, GradSync::Full)?; // gradients are reduce-scattered
        optimizer.step(LEARNING_RATE)?;
        model.zero_grad()?;

        let mean = loss.detach().to_kind(Kind::Float);
        world_group
            .all_reduce(&mean, ReduceOp::Mean, Purpose::Control)?
            .wait()?;
        losses.push(f64::try_from(&mean)?);
        if world.rank() == 0 {
            println!("step {step} loss {:.6}", losses[losses.len() - 1]);
        }
    }
    if losses[losses.len() - 1] > 0.8 * losses[0] {
        eprintln!("the loss did not decrease: {losses:?}");
        std::process::exit(1);
    }
    Ok(())
}
