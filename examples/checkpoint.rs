//! Checkpoints of a custom training loop: the job goes on where it was stopped, on any number of ranks.
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/checkpoint /tmp/checkpoints
//! ```
//!
//! Comments show the corresponding PyTorch calls.

use trainyard::data::{Sampler, SyntheticTokens, step_batches};
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::{
    Axis, Builder, Context, DataParallelWrapper, Decoder, DecoderConfig, FullyShard, GradSync,
    Model, Module, Purpose, ReduceOp, Result, ShardOptions, Strategy, checkpoint,
};

const STEPS: u64 = 20;
const SEQ_LEN: usize = 64;

fn main() -> Result<()> {
    let folder = std::env::args().nth(1);
    let folder = folder.unwrap_or_else(|| "outputs/checkpoint".to_owned());
    let world = trainyard::init_along(Axis::DpShard)?;
    let builder = Builder::new(1).device(world.device().into());
    let model = Decoder::build(&DecoderConfig::debug(), SEQ_LEN, &builder)?;
    let model = FullyShard::new(model, &world, ShardOptions::default())?;
    let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());

    // torch.distributed.checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    let first = checkpoint::load(&folder, &world, &model, &mut optimizer)?.unwrap_or(0);

    let source = SyntheticTokens::new(SEQ_LEN, DecoderConfig::debug().vocab_size, 1)?;
    let sampler = Sampler::new(8, world.size(), 1)?;
    for step in first..STEPS {
        let batch =
            step_batches(&source, &sampler, step, world.rank(), world.device())?.swap_remove(0);
        let run = model.forward(&batch.inputs, &Context::training(step))?;
        let loss = model.loss(run.output(), &batch.targets)? / batch.num_targets as f64;
        model.backward(run, &loss, GradSync::Full)?;
        optimizer.step(3e-3)?;
        model.zero_grad()?;

        let mean = loss.detach();
        let group = world.world_group()?;
        group
            .all_reduce(&mean, ReduceOp::Mean, Purpose::Control)?
            .wait()?;
        if world.rank() == 0 {
            println!("step {step} loss {:.6}", f64::try_from(&mean)?);
        }
        if (step + 1) % 10 == 0 {
            // torch.distributed.checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
            checkpoint::save(&folder, &world, &model, &optimizer, step + 1)?;
        }
    }
    Ok(())
}
