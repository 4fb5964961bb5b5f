//! ZeRO 2 in float16: two processes, each with half of the gradients and optimizer states.
//!
//! ```text
//! target/release/examples/mnist_zero2_fp16 data/mnist
//! ```

mod digits;

use digits::{Digits, STEPS, cnn, learning_rate, report};
use trainyard::cost::Stage;
use trainyard::data::Split;
use trainyard::optim::{AdamW, AdamWConfig};
use trainyard::{
    Axis, Context, DataParallelWrapper, FullyShard, GradScaler, GradSync, Model, Module, Precision,
    Result, ShardOptions, Strategy,
};

fn main() -> Result<()> {
    trainyard::spawn(2, || {
        let world = trainyard::init_along(Axis::DpShard)?;
        let digits = Digits::open(Split::Train)?;
        // deepspeed.initialize(model, config={"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}})
        let options = ShardOptions {
            stage: Stage::Gradients,
            precision: Precision::fp16(),
            ..ShardOptions::default()
        };
        let model = FullyShard::new(cnn()?, &world, options)?;
        let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());
        let mut scaler = GradScaler::new(&model.parameters(), &world)?;
        for step in 0..STEPS {
            let (images, labels) = digits.batch(step, world.rank(), world.size());
            let run = model.forward(&images, &Context::training(step))?;
            let loss = model.loss(run.output(), &labels)? / labels.numel() as f64;
            model.backward(run, &scaler.scale(&loss)?, GradSync::Full)?;
            scaler.step(&model, &mut optimizer, learning_rate(step))?;
            model.zero_grad()?;
        }
        report(Some(&world), |images, cx| {
            Ok(Some(model.forward(images, cx)?.into_output()))
        })
    })
}
