//! Pipeline parallelism: two processes, each with some of the layers, work on different micro-batches.
//!
//! ```text
//! target/release/examples/mnist_pipeline data/mnist
//! ```

mod digits;

use digits::{Digits, STEPS, cnn, learning_rate, report};
use trainyard::data::Split;
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::{Axis, Module, PipelineOptions, Result, Strategy, pipeline};

const CHUNKS: usize = 4;

fn main() -> Result<()> {
    trainyard::spawn(2, || {
        let world = trainyard::init_along(Axis::Pp)?;
        let digits = Digits::open(Split::Train)?;
        let (microbatch, _) = digits.batch(0, 0, CHUNKS);
        let options = PipelineOptions {
            chunks: CHUNKS,
            ..PipelineOptions::default()
        };
        let model = pipeline(cnn()?, &world, &microbatch, options)?;
        let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());
        for step in 0..STEPS {
            let (images, labels) = digits.batch(step, 0, 1);
            let _loss = model.step(&images, &labels, step)?; // on the rank of the last stage
            optimizer.step(learning_rate(step))?;
            model.zero_grad()?;
        }
        report(Some(&world), |images, _| Ok(model.predict(images)?))?;
        // Rank 0 may host the store: no rank exits before all are done.
        Ok(world.world_group()?.barrier()?.wait()?)
    })
}
