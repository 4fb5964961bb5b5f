//! Tensor parallelism: two processes with the same batch, each with half of the linear layers.
//!
//! ```text
//! target/release/examples/mnist_tensor_parallel data/mnist
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
    trainyard::spawn(2, || {
        let world = trainyard::init_along(Axis::Tp)?;
        let digits = Digits::open(Split::Train)?;
        // parallelize_module(model, mesh["tp"], {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
        let plan = [("fc1", Colwise), ("fc2", Rowwise)];
        let model = parallelize(cnn()?, &world.group(Axis::Tp)?, plan)?;
        let replicas = world.group(Axis::DpReplicate)?; // one
        let model = Ddp::new(model, &replicas, DdpOptions::default())?;
        let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());
        for step in 0..STEPS {
            let (images, labels) = digits.batch(step, 0, 1);
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
