//! Hybrid: four processes, two replicas of the network, each of which two processes share by tensor parallelism.
//!
//! ```text
//! target/release/examples/mnist_hybrid data/mnist
//! ```

mod digits;

use digits::{Digits, STEPS, cnn, learning_rate, report};
use trainyard::ParallelStyle::{Colwise, Rowwise};
use trainyard::data::Split;
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::{
    Axis, Context, DataParallelWrapper, Ddp, DdpOptions, GradSync, Model, Module, Result, Strategy,
    parallelize,
};

fn main() -> Result<()> {
    trainyard::spawn(4, || {
        let world = trainyard::init_mesh(&[(Axis::DpReplicate, 2), (Axis::Tp, 2)])?;
        let digits = Digits::open(Split::Train)?;
        let plan = [("fc1", Colwise), ("fc2", Rowwise)];
        let model = parallelize(cnn()?, &world.group(Axis::Tp)?, plan)?;
        let replicas = world.group(Axis::DpReplicate)?;
        let model = Ddp::new(model, &replicas, DdpOptions::default())?;
        let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());
        for step in 0..STEPS {
            let (images, labels) = digits.batch(step, replicas.index(), replicas.size());
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
