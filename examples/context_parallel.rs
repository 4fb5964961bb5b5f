//! Context parallelism with a custom training loop: all ranks have the same sequences, each rank some of
//! their positions, and attention exchanges keys and values between ranks (ring) or heads (Ulysses).
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/context_parallel
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/context_parallel ulysses
//! ```
//!
//! Comments show the corresponding PyTorch calls.

use trainyard::data::{Sampler, SyntheticTokens, step_batches};
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::parallel::{DataParallelWrapper, GradSync, Strategy};
use trainyard::{
    Axis, Builder, Context, ContextParallel, ContextParallelMethod, Ddp, DdpOptions, Decoder,
    DecoderConfig, Model, Module, Purpose, ReduceOp, Result,
};

const STEPS: u64 = 30;
const SEQ_LEN: usize = 128;
const LEARNING_RATE: f64 = 3e-3;

fn main() -> Result<()> {
    let method = match std::env::args().nth(1).as_deref() {
        Some("ulysses") => ContextParallelMethod::Ulysses,
        _ => ContextParallelMethod::Ring,
    };
    // init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    let world = trainyard::init_along(Axis::Cp)?;
    let group = world.group(Axis::Cp)?;
    let cp = ContextParallel::new(&group, method);

    // The model knows the positions of this rank and applies the rotary embedding for them.
    let builder = Builder::new(1)
        .device(world.device().into())
        .with_context_parallel(cp.clone());
    let model = Decoder::build(&DecoderConfig::debug(), SEQ_LEN, &builder)?;

    // Every rank has a part of the loss, so gradients are summed over ranks.
    let options = DdpOptions {
        op: ReduceOp::Sum,
        ..DdpOptions::default()
    };
    let model = Ddp::new(model, &group, options)?;
    let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());

    let source = SyntheticTokens::new(SEQ_LEN, DecoderConfig::debug().vocab_size, 1)?;
    let sampler = Sampler::new(4, 1, 1)?; // one batch for all ranks
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let batch = step_batches(&source, &sampler, step, 0, world.device())?.swap_remove(0);
        // with context_parallel(mesh, buffers=[inputs, targets], buffer_seq_dims=[1, 1]):
        let (inputs, targets) = (cp.shard(&batch.inputs)?, cp.shard(&batch.targets)?);
        let run = model.forward(&inputs, &Context::training(step))?;
        let loss = model.loss(run.output(), &targets)? / batch.num_targets as f64;
        model.backward(run, &loss, GradSync::Full)?;
        optimizer.step(LEARNING_RATE)?;
        model.zero_grad()?;

        let total = loss.detach();
        group
            .all_reduce(&total, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        losses.push(f64::try_from(&total)?);
        if world.rank() == 0 {
            println!("step {step} loss {:.6}", losses[losses.len() - 1]);
        }
    }
    if losses[losses.len() - 1] > 0.8 * losses[0] {
        eprintln!("the loss did not decrease: {losses:?}");
        std::process::exit(1);
    }
    Ok(())
}
