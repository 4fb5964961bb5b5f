//! `Ddp`: two processes, each with a replica of the network and half of every batch.
//!
//! ```text
//! target/release/examples/mnist_ddp data/mnist
//! ```

mod digits;

use digits::{Digits, STEPS, cnn, learning_rate, report};
use trainyard::data::Split;
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::{
    Context, DataParallelWrapper, Ddp, DdpOptions, GradSync, Model, Module, Result, Strategy,
};

fn main() -> Result<()> {
    trainyard::spawn(2, || {
        let world = trainyard::init()?;
        let digits = Digits::open(Split::Train)?;
        // DistributedDataParallel(model)
        let model = Ddp::new(cnn()?, &world.world_group()?, DdpOptions::default())?;
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
