//! Fully sharded: two processes, each with half of every parameter, gradient and optimizer state.
//!
//! ```text
//! target/release/examples/mnist_fsdp data/mnist
//! ```

mod digits;

use digits::{Digits, STEPS, cnn, learning_rate, report};
use trainyard::data::Split;
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::{
    Axis, Context, DataParallelWrapper, GradSync, Model, Module, Result, Strategy, WrapPolicy,
    fully_shard,
};

fn main() -> Result<()> {
    trainyard::spawn(2, || {
        let world = trainyard::init_along(Axis::DpShard)?;
        let digits = Digits::open(Split::Train)?;
        // fully_shard(model)
        let model = fully_shard(cnn()?, &world, WrapPolicy::EveryUnit)?;
        let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());
        for step in 0..STEPS {
            let (images, labels) = digits.batch(step, world.rank(), world.size());
            let run = model.forward(&images, &Context::training(step))?;
            let loss = model.loss(run.output(), &labels)? / labels.numel() as f64;
            model.backward(run, &loss, GradSync::Full)?;
            optimizer.step(learning_rate(step))?;
            model.zero_grad()?;
        }
        report(Some(&world), |images, cx| {
            Ok(Some(model.forward(images, cx)?.into_output()))
        })
    })
}
