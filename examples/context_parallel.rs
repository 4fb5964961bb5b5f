//! Context parallelism with a loop of one's own: all ranks see the same sequences, each some of their
//! positions, and attention reaches across ranks by passing keys and values round.
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/context_parallel
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/context_parallel ulysses
//! ```
//!
//! Comments name PyTorch's calls.

use trainyard::data::{Sampler, SyntheticTokens, step_batches};
use trainyard::parallel::{Strategy, Sync};
use trainyard::train::optimizer;
use trainyard::{
    Axis, Builder, Context, ContextMethod, ContextParallel, Ddp, DdpOptions, Llama, LlamaConfig,
    Model, Module, Purpose, ReduceOp, Result,
};

const STEPS: u64 = 30;
const SEQ_LEN: usize = 128;
const LEARNING_RATE: f64 = 3e-3;

fn main() -> Result<()> {
    let method = match std::env::args().nth(1).as_deref() {
        Some("ulysses") => ContextMethod::Ulysses,
        _ => ContextMethod::Ring,
    };
    // init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    let world = trainyard::init_along(Axis::Cp)?;
    let group = world.group(Axis::Cp)?;
    let cp = ContextParallel::new(&group, method);

    // The model knows which positions are this rank's, and turns its heads accordingly.
    let builder = Builder::new(1).with_context_parallel(cp.clone());
    let model = Llama::build(&LlamaConfig::little(), SEQ_LEN, &builder)?;

    // Every rank has a part of the loss, so gradients are added up as over parts of a batch.
    let options = DdpOptions {
        op: ReduceOp::Sum,
        ..DdpOptions::default()
    };
    let model = Ddp::new(model, &group, options)?;
    let mut optimizer = optimizer::build(&Default::default(), model.parameters());

    let source = SyntheticTokens::new(SEQ_LEN, LlamaConfig::little().vocab_size, 1)?;
    let sampler = Sampler::new(4, 1, 1)?; // one batch for all ranks
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let batch = step_batches(&source, &sampler, step, 0)?.swap_remove(0);
        // with context_parallel(mesh, buffers=[inputs, targets], buffer_seq_dims=[1, 1]):
        let (inputs, targets) = (cp.part(&batch.inputs)?, cp.part(&batch.targets)?);
        let run = model.forward(&inputs, &Context::training(step))?;
        let loss = model.loss(run.output(), &targets)? / batch.num_targets as f64;
        model.backward(run, &loss, Sync::Reduce)?;
        optimizer.step(LEARNING_RATE, None)?;
        model.zero_grad()?;

        let total = loss.detach();
        group
            .all_reduce(&total, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        losses.push(f64::try_from(&total)?);
        if world.rank() == 0 {
            println!("step {step} loss {:.4}", losses[losses.len() - 1]);
        }
    }
    if losses[losses.len() - 1] > 0.8 * losses[0] {
        eprintln!("the loss did not fall: {losses:?}");
        std::process::exit(1);
    }
    Ok(())
}
