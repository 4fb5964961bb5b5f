//! Pipeline parallelism with a custom training loop: every rank has some of the layers, and the ranks
//! compute different micro-batches at the same time.
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/pipeline
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/pipeline zb-h1
//! ```
//!
//! Comments show the corresponding PyTorch calls.

use std::rc::Rc;

use trainyard::cost::partition_balanced;
use trainyard::data::{Sampler, SyntheticTokens, step_batches};
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::parallel::{
    ActivationSpec, DataParallelWrapper, Microbatch, Pipeline, StageModel, StepInputs, Strategy,
};
use trainyard::schedule::{ScheduleKind, ShardingPolicy};
use trainyard::{
    Axis, Builder, Context, Ddp, DdpOptions, Decoder, DecoderConfig, Kind, Model, Module, Result,
    Tensor,
};

const STEPS: u64 = 30;
const SEQ_LEN: usize = 64;
const MICROBATCHES: usize = 4;
const SAMPLES: usize = 2; // per micro-batch
const LEARNING_RATE: f64 = 3e-3;

fn main() -> Result<()> {
    let kind = std::env::args().nth(1).unwrap_or_else(|| "1f1b".to_owned());
    let kind: ScheduleKind = kind.parse().unwrap_or(ScheduleKind::OneForwardOneBackward);
    let world = trainyard::init_along(Axis::Pp)?;
    let group = world.group(Axis::Pp)?;
    let config = DecoderConfig::debug();

    // ScheduleGPipe, Schedule1F1B, ...: here a list of actions per rank, computed before training
    let chunks = kind.num_chunks().unwrap_or(1);
    let schedule = match kind.build(world.size(), MICROBATCHES, chunks) {
        Ok(schedule) => schedule,
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(2);
        }
    };

    // PipelineStage(module, stage_index, num_stages, device): a range of units of the model
    let model: Rc<dyn Model> = Rc::new(Decoder::build(
        &config,
        SEQ_LEN,
        &Builder::new(1).device(world.device().into()),
    )?);
    let costs = vec![1.0; model.units().len()];
    let splits = partition_balanced(&costs, schedule.num_stages())?;
    let mut stages: Vec<Box<dyn DataParallelWrapper>> = Vec::new();
    for stage in schedule.stages_of(group.index()) {
        let stage_model = StageModel::new(Rc::clone(&model), splits[stage].clone());
        let replicas = world.group(Axis::DpReplicate)?;
        stages.push(Box::new(Ddp::new(
            stage_model,
            &replicas,
            DdpOptions::default(),
        )?));
    }
    // Activations between stages: [batch, sequence, hidden].
    let shape = |_| ActivationSpec {
        size: vec![SAMPLES as i64, SEQ_LEN as i64, config.hidden_size as i64],
        like: Tensor::empty([0], (Kind::Float, world.device())),
        num_tokens: (SAMPLES * SEQ_LEN) as u64,
        num_shards: 1,
    };
    let shapes = (1..schedule.num_stages()).map(shape).collect();
    let pipeline = Pipeline::new(schedule, stages, &group, shapes, ShardingPolicy::default())?;
    let mut optimizer = AdamW::new(pipeline.parameters(), AdamWConfig::default());

    let source = SyntheticTokens::new(SEQ_LEN, config.vocab_size, 1)?;
    let sampler = Sampler::new(SAMPLES * MICROBATCHES, 1, MICROBATCHES)?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let batches = step_batches(&source, &sampler, step, 0, world.device())?;
        let microbatches = batches.iter().map(|batch| Microbatch {
            inputs: &batch.inputs,
            targets: &batch.targets,
            cx: Context::training(step),
        });
        // schedule.step(x, target=y, losses=losses)
        let loss = pipeline.run_step(&StepInputs {
            microbatches: microbatches.collect(),
            count: batches.iter().map(|batch| batch.num_targets).sum::<i64>() as f64,
            scale: 1.0,
            is_guarded: false,
            ledger: world.ledger(),
        })?;
        optimizer.step(LEARNING_RATE)?;
        pipeline.zero_grad()?;
        // Only the rank with the last stage has a loss.
        if let Some(loss) = loss {
            losses.push(f64::try_from(&loss)?);
            println!("step {step} loss {:.6}", losses[losses.len() - 1]);
        }
    }
    if let [first, .., last] = losses[..]
        && last > 0.8 * first
    {
        eprintln!("the loss did not decrease: {losses:?}");
        std::process::exit(1);
    }
    Ok(group.barrier()?.wait()?)
}
