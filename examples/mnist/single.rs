//! One process: the program that the others of this directory distribute.
//!
//! ```text
//! target/release/examples/mnist_single data/mnist
//! ```

mod digits;

use digits::{Digits, STEPS, cnn, learning_rate, report};
use trainyard::data::Split;
use trainyard::nn::run;
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::torch::autograd;
use trainyard::{Context, Model, Module, Result};

fn main() -> Result<()> {
    let digits = Digits::open(Split::Train)?;
    let model = cnn()?;
    let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());
    for step in 0..STEPS {
        let (images, labels) = digits.batch(step, 0, 1);
        let pass = run(&model, &images, &Context::training(step), &[])?;
        let loss = model.loss(pass.output(), &labels)? / labels.numel() as f64;
        pass.backward(&loss)?;
        optimizer.step(learning_rate(step))?;
        for parameter in model.parameters() {
            autograd::clear_grad(parameter.tensor())?;
        }
    }
    report(None, |images, cx| {
        Ok(Some(run(&model, images, cx, &[])?.into_output()))
    })
}
