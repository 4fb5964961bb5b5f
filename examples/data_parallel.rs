//! Data parallelism in one process: a replica of the model on a thread per device.
//!
//! ```text
//! target/release/examples/data_parallel
//! ```
//!
//! For a single host, like PyTorch's `nn.DataParallel`; to use several hosts, see `ddp.rs`.
//! Comments show the corresponding PyTorch calls.

use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::tch;
use trainyard::{Builder, DataParallel, Device, Kind, Module, Result, SimpleCnn, Tensor};

const STEPS: u64 = 12;
const BATCH: i64 = 32;
const NUM_REPLICAS: usize = 2;
const LEARNING_RATE: f64 = 3e-4;

fn main() -> Result<()> {
    tch::set_num_threads(1); // per replica
    let build = |_replica| SimpleCnn::build(&Builder::new(1));
    let model = DataParallel::new(build(0)?, NUM_REPLICAS, build)?; // nn.DataParallel(model)
    let parameters = model.model().parameters();
    let mut optimizer = AdamW::new(parameters, AdamWConfig::default()); // optim.AdamW

    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (images, labels) = batch(step);
        let loss = model.step(&images, &labels, step)?; // criterion(model(images), labels).backward()
        optimizer.step(LEARNING_RATE)?; // optimizer.step()
        model.zero_grad()?; // optimizer.zero_grad()
        losses.push(f64::try_from(&loss)?);
        println!("step {step} loss {:.6}", losses[losses.len() - 1]);
    }
    if losses[losses.len() - 1] > 0.5 * losses[0] {
        eprintln!("the loss did not decrease: {losses:?}");
        std::process::exit(1);
    }
    Ok(())
}

/// Noisy images with one bright bar each; the row of the bar is the label.
fn batch(step: u64) -> (Tensor, Tensor) {
    tch::manual_seed(step as i64);
    let labels = Tensor::randint(10, [BATCH], (Kind::Int64, Device::Cpu));
    let bars = Tensor::eye(10, (Kind::Float, Device::Cpu)).repeat_interleave_self_int(2, 1, None);
    let rows = bars.index_select(0, &labels).constant_pad_nd([4, 4]);
    let noise = Tensor::randn([BATCH, 1, 28, 28], (Kind::Float, Device::Cpu)) * 0.1;
    (rows.view([BATCH, 1, 28, 1]) + noise, labels)
}
