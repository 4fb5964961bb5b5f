//! Naive model parallelism: each rank has some of the layers, and activations and gradients are sent
//! between ranks explicitly.
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/layer_parallel
//! ```
//!
//! The model may be larger than the memory of one rank, but only one rank computes at a time. Pipeline
//! parallelism (`pipeline.rs`) solves this.

use trainyard::data::{Sampler, SyntheticImages, step_batches};
use trainyard::nn::layers::Linear;
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::torch::autograd;
use trainyard::{
    Axis, Builder, Device, Group, Init, Kind, Module, Purpose, Result, Tensor, cross_entropy_sum,
    mesh,
};

const STEPS: u64 = 30;
const BATCH: usize = 32;
const LEARNING_RATE: f64 = 3e-3;
const WIDTHS: [usize; 5] = [784, 256, 128, 64, 10];
const TAG: u16 = 0;

/// The layers of one rank.
struct Stage {
    layers: Vec<Linear>,
    is_last: bool,
}

impl Stage {
    /// An equal share of the layers. Their initial weights do not depend on the rank.
    fn build(rank: usize, num_ranks: usize) -> Result<Stage> {
        let num_layers = WIDTHS.len() - 1;
        let own = mesh::chunk(num_layers, num_ranks, rank);
        let is_last = own.end == num_layers;
        let layers = own.map(|index| {
            let (inputs, outputs) = (WIDTHS[index], WIDTHS[index + 1]);
            let builder = Builder::new(1).push(&format!("layers.{index}"));
            Linear::with_bias(&builder, inputs, outputs, Init::fan_in(inputs))
        });
        Ok(Stage {
            layers: layers.collect::<Result<_, _>>()?,
            is_last,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.shallow_clone();
        for (index, layer) in self.layers.iter().enumerate() {
            x = layer.forward(&x)?;
            if !(self.is_last && index + 1 == self.layers.len()) {
                x = x.relu();
            }
        }
        Ok(x)
    }

    fn num_inputs(&self, rank: usize, num_ranks: usize) -> i64 {
        WIDTHS[mesh::chunk(WIDTHS.len() - 1, num_ranks, rank).start] as i64
    }
}

fn main() -> Result<()> {
    let world = trainyard::init_along(Axis::Pp)?;
    let group = world.world_group()?;
    let (rank, num_ranks) = (world.rank(), world.size());
    let stage = Stage::build(rank, num_ranks)?;
    let mut optimizer = AdamW::new(stage.layers.parameters(), AdamWConfig::default());

    let source = SyntheticImages::new(1);
    let sampler = Sampler::new(BATCH, 1, 1)?;
    // Synthetic images have random labels, so the model overfits a single batch.
    let batch = step_batches(&source, &sampler, 0, 0, Device::Cpu)?.swap_remove(0);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        // Forward: receive activations from the previous rank, compute, send to the next rank.
        let x = match rank {
            0 => batch.inputs.flatten(1, -1),
            _ => recv(
                &group,
                rank - 1,
                &[BATCH as i64, stage.num_inputs(rank, num_ranks)],
            )?
            .set_requires_grad(true),
        };
        let y = stage.forward(&x)?;
        // Backward: receive gradients from the next rank, compute, send to the previous rank.
        if stage.is_last {
            let loss = cross_entropy_sum(&y, &batch.targets)? / BATCH as f64;
            loss.backward();
            losses.push(f64::try_from(&loss)?);
        } else {
            send(&group, rank + 1, &y.detach())?;
            let gradient = recv(&group, rank + 1, &y.size())?;
            autograd::backward(&[&y], &[&gradient])?;
        }
        if rank > 0 {
            send(&group, rank - 1, &x.grad())?;
        }
        optimizer.step(LEARNING_RATE)?;
        stage
            .layers
            .visit(&mut |p| p.tensor().shallow_clone().zero_grad());
        if let Some(loss) = losses.last() {
            println!("step {step} loss {loss:.6}");
        }
    }
    if stage.is_last && losses[losses.len() - 1] > 0.5 * losses[0] {
        eprintln!("the loss did not decrease: {losses:?}");
        std::process::exit(1);
    }
    // Rank 0 may host the TCPStore: no rank exits before all are done.
    Ok(group.barrier()?.wait()?)
}

fn send(group: &Group, to: usize, tensor: &Tensor) -> Result<()> {
    Ok(group
        .send(&tensor.contiguous(), to, TAG, Purpose::Activation)?
        .wait()?)
}

fn recv(group: &Group, from: usize, shape: &[i64]) -> Result<Tensor> {
    let tensor = Tensor::empty(shape, (Kind::Float, Device::Cpu));
    group
        .recv(&tensor, from, TAG, Purpose::Activation)?
        .wait()?;
    Ok(tensor)
}
