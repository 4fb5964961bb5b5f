//! `DataParallel`: one process with a replica of the network on each of two threads.
//!
//! ```text
//! target/release/examples/mnist_threads data/mnist
//! ```

mod digits;

use digits::{Digits, STEPS, cnn, learning_rate, report};
use trainyard::data::Split;
use trainyard::nn::run;
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::{DataParallel, Module, Result, tch};

fn main() -> Result<()> {
    tch::set_num_threads(1); // per replica
    let digits = Digits::open(Split::Train)?;
    let model = DataParallel::new(cnn()?, 2, |_replica| cnn())?; // nn.DataParallel(model)
    let mut optimizer = AdamW::new(model.model().parameters(), AdamWConfig::default());
    for step in 0..STEPS {
        let (images, labels) = digits.batch(step, 0, 1);
        let _loss = model.step(&images, &labels, step)?; // divides the batch over the replicas
        optimizer.step(learning_rate(step))?;
        model.zero_grad()?;
    }
    report(None, |images, cx| {
        Ok(Some(run(model.model(), images, cx, &[])?.into_output()))
    })
}
