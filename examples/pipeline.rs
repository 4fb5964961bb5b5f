//! A pipeline with a loop of one's own: every rank holds some layers and works on another micro-batch.
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/pipeline
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/pipeline zb-h1
//! ```
//!
//! Comments name PyTorch's calls.

use std::rc::Rc;

use trainyard::data::{Sampler, SyntheticTokens, step_batches};
use trainyard::parallel::{Part, Pass, Pipeline, Shape, Step, Strategy, balanced};
use trainyard::schedule::{Kind as ScheduleKind, Sharing};
use trainyard::train::optimizer;
use trainyard::{
    Axis, Builder, Context, Ddp, DdpOptions, Device, Kind, Llama, LlamaConfig, Model, Module,
    Result, Tensor,
};

const STEPS: u64 = 30;
const SEQ_LEN: usize = 64;
const MICROBATCHES: usize = 4;
const SAMPLES: usize = 2; // of a micro-batch
const LEARNING_RATE: f64 = 3e-3;

fn main() -> Result<()> {
    let kind = std::env::args().nth(1).unwrap_or_else(|| "1f1b".to_owned());
    let kind: ScheduleKind = kind.parse().unwrap_or(ScheduleKind::OneForwardOneBackward);
    let world = trainyard::init_along(Axis::Pp)?;
    let group = world.group(Axis::Pp)?;
    let config = LlamaConfig::little();

    // ScheduleGPipe, Schedule1F1B, ...: here a list of actions for each rank, made before anything runs
    let chunks = kind.num_chunks().unwrap_or(1);
    let schedule = match kind.build(world.size(), MICROBATCHES, chunks) {
        Ok(schedule) => schedule,
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(2);
        }
    };

    // PipelineStage(module, stage_index, num_stages, device): some units of the model
    let model: Rc<dyn Model> = Rc::new(Llama::build(&config, SEQ_LEN, &Builder::new(1))?);
    let costs = vec![1.0; model.units().len()];
    let cuts = balanced(&costs, schedule.num_stages())?;
    let mut stages: Vec<Box<dyn Strategy>> = Vec::new();
    for stage in schedule.stages_of(group.index()) {
        let part = Part::new(Rc::clone(&model), cuts[stage].clone());
        let alone = world.group(Axis::DpReplicate)?;
        stages.push(Box::new(Ddp::new(part, &alone, DdpOptions::default())?));
    }
    // What a stage gives to the next: [samples, positions, width].
    let shape = |_| Shape {
        size: vec![SAMPLES as i64, SEQ_LEN as i64, config.hidden_size as i64],
        like: Tensor::empty([0], (Kind::Float, Device::Cpu)),
        num_tokens: (SAMPLES * SEQ_LEN) as u64,
        num_sharers: 1,
    };
    let shapes = (1..schedule.num_stages()).map(shape).collect();
    let pipeline = Pipeline::new(schedule, stages, &group, shapes, Sharing::default())?;
    let mut optimizer = optimizer::build(&Default::default(), pipeline.parameters());

    let source = SyntheticTokens::new(SEQ_LEN, config.vocab_size, 1)?;
    let sampler = Sampler::new(SAMPLES * MICROBATCHES, 1, MICROBATCHES)?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let batches = step_batches(&source, &sampler, step, 0)?;
        let passes = batches.iter().map(|batch| Pass {
            inputs: &batch.inputs,
            targets: &batch.targets,
            cx: Context::training(step),
        });
        // schedule.step(x, target=y, losses=losses)
        let loss = pipeline.run_step(&Step {
            passes: passes.collect(),
            count: batches.iter().map(|batch| batch.num_targets).sum::<i64>() as f64,
            scale: 1.0,
            ledger: world.ledger(),
        })?;
        optimizer.step(LEARNING_RATE, None)?;
        pipeline.zero_grad()?;
        // Only the rank with the last stage has a loss.
        if let Some(loss) = loss {
            losses.push(f64::try_from(&loss)?);
            println!("step {step} loss {:.4}", losses[losses.len() - 1]);
        }
    }
    if let [first, .., last] = losses[..]
        && last > 0.8 * first
    {
        eprintln!("the loss did not fall: {losses:?}");
        std::process::exit(1);
    }
    Ok(group.barrier()?.wait()?)
}
