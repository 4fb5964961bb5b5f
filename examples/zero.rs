//! Memory of the ZeRO stages: trains the same model with each stage and compares the bytes of its states on
//! this rank with the formula.
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/zero
//! ```

use trainyard::cost::CostModel;
use trainyard::data::{Sampler, SyntheticTokens, step_batches};
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::parallel::{
    DataParallelWrapper, FullyShard, GradSync, ShardOptions, Stage, Strategy,
};
use trainyard::torch::memory;
use trainyard::{
    Axis, Builder, Context, Decoder, DecoderConfig, Device, Error, Model, Module, Result, World,
};

const SEQ_LEN: usize = 64;

fn main() -> Result<()> {
    memory::observe();
    let world = trainyard::init_along(Axis::DpShard)?;
    for stage in [Stage::OptimizerStates, Stage::Gradients, Stage::Parameters] {
        train(stage, &world)?;
    }
    Ok(())
}

fn train(stage: Stage, world: &World) -> Result<()> {
    let before = memory::report()?.allocated;
    let model = Decoder::build(&DecoderConfig::debug(), SEQ_LEN, &Builder::new(1))?;
    let options = ShardOptions {
        stage,
        ..ShardOptions::default()
    };
    let model = FullyShard::new(model, world, options)?;
    let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());
    let source = SyntheticTokens::new(SEQ_LEN, DecoderConfig::debug().vocab_size, 1)?;
    let sampler = Sampler::new(12, world.size(), 1)?;
    for step in 0..3 {
        let batch =
            step_batches(&source, &sampler, step, world.rank(), Device::Cpu)?.swap_remove(0);
        let run = model.forward(&batch.inputs, &Context::training(step))?;
        let loss = model.loss(run.output(), &batch.targets)? / batch.num_targets as f64;
        model.backward(run, &loss, GradSync::Full)?;
        optimizer.step(3e-3)?;
        model.zero_grad()?;
    }
    let after = memory::report()?.allocated;
    let allocated: u64 = (0..3).map(|kind| after[kind] - before[kind]).sum();
    // The optimizer has a scalar step count per parameter.
    let counters = 4 * model.parameters().len() as u64;
    let moments = optimizer.moment_bytes(&model.parameters());
    let expected = model.states().total() + moments + counters;
    if world.rank() == 0 {
        println!("{stage:?}: {allocated} bytes of states; formula: {expected}");
    }
    if allocated == expected {
        Ok(())
    } else {
        Err(Error::Dataset(format!(
            "{stage:?}: {allocated} bytes of states, expected {expected}"
        )))
    }
}
