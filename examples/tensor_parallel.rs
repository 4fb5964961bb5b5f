//! Tensor parallelism with a custom training loop: all ranks have the same batch, and each has a shard of
//! every weight matrix. Activations between them are sharded by position (sequence parallelism).
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/tensor_parallel
//! ```
//!
//! Comments show the corresponding PyTorch calls. The code of the model is the same on one rank and on many: the
//! builder determines how layers are sharded.

use trainyard::data::{Sampler, SyntheticTokens, step_batches};
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::parallel::{DataParallelWrapper, GradSync, Strategy};
use trainyard::{
    Axis, Builder, Context, Ddp, DdpOptions, Decoder, DecoderConfig, Model, Module, Result,
    SequenceParallel, TensorParallel,
};

const STEPS: u64 = 30;
const SEQ_LEN: usize = 64;
const LEARNING_RATE: f64 = 3e-3;

fn main() -> Result<()> {
    // init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    let world = trainyard::init_along(Axis::Tp)?;

    // parallelize_module(model, mesh["tp"], {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel(),
    //     "input_layernorm": SequenceParallel(), ...}): here each layer has its own plan.
    let tp = TensorParallel::new(&world.group(Axis::Tp)?, SequenceParallel::SaveGathered);
    let builder = Builder::new(1)
        .device(world.device().into())
        .with_tensor_parallel(tp);
    let model = Decoder::build(&DecoderConfig::debug(), SEQ_LEN, &builder)?;
    if world.rank() == 0 {
        show_layouts(&model);
    }

    // One replica of the model: only the gradients of parameters that are replicated over `tp` are reduced.
    let model = Ddp::new(
        model,
        &world.group(Axis::DpReplicate)?,
        DdpOptions::default(),
    )?;
    let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());

    let source = SyntheticTokens::new(SEQ_LEN, DecoderConfig::debug().vocab_size, 1)?;
    let sampler = Sampler::new(8, 1, 1)?; // one batch for all ranks
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let batch = step_batches(&source, &sampler, step, 0, world.device())?.swap_remove(0);
        let run = model.forward(&batch.inputs, &Context::training(step))?;
        // loss_parallel(): logits stay sharded.
        let loss = model.loss(run.output(), &batch.targets)? / batch.num_targets as f64;
        model.backward(run, &loss, GradSync::Full)?;
        optimizer.step(LEARNING_RATE)?;
        model.zero_grad()?;

        losses.push(f64::try_from(&loss)?);
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

/// Prints the layouts of the parameters of the first block and the sizes of this rank's shards.
fn show_layouts(model: &Decoder) {
    let first_block = |name: &str| name.starts_with("model.layers.0.");
    for parameter in model.parameters().iter().filter(|p| first_block(p.name())) {
        let local = parameter.tensor().size();
        println!("{parameter:?}, local shard {local:?}");
    }
}
