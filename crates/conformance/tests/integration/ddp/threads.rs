//! Data parallelism in one process.

use std::collections::BTreeMap;
use std::error::Error;

use tch::{Device, Kind, Tensor};
use trainyard_arch::DecoderConfig;
use trainyard_config::{Config, Dtype, ModelSpec};
use trainyard_conformance::training::{debug_llama, distance, values};
use trainyard_conformance::{Outcome, Rank, device};
use trainyard_data::{Batch, collate};
use trainyard_nn::{Builder, Decoder, Module, NnError};
use trainyard_parallel::{DataParallel, ParallelError};
use trainyard_torch::{World, autograd};
use trainyard_train::{build, optimizer};

/// Losses, and all parameters after the last step.
type Trained = (Vec<f64>, BTreeMap<String, Tensor>);

const NUM_STEPS: u64 = 20;

fn shape(config: &Config) -> Result<DecoderConfig, Box<dyn Error>> {
    match config.model.resolve()? {
        ModelSpec::Decoder(decoder) => Ok(*decoder),
        _ => Err("not a decoder".into()),
    }
}

fn replicas(config: &Config, number: usize) -> Result<DataParallel<Decoder>, Box<dyn Error>> {
    let (shape, seq_len) = (shape(config)?, config.training.seq_len);
    // Replicas copy the weights of the model, so their own initial weights do not matter.
    let build = move |index: usize| {
        let builder = Builder::new(1 + index as u64).kind(Kind::Double);
        Decoder::build(&shape, seq_len, &builder.device(device_of(index).into()))
    };
    Ok(DataParallel::new(build(0)?, number, build)?)
}

/// The GPUs of this node in turn; the CPU if there are none.
fn device_of(index: usize) -> Device {
    match device() {
        Device::Cuda(_) => Device::Cuda(index % tch::Cuda::device_count().max(1) as usize),
        other => other,
    }
}

fn batch(config: &Config, step: u64, rows: u64) -> Result<Batch, Box<dyn Error>> {
    let source = build::source(&config.into(), build::Phase::Training)?;
    let samples = (step * rows..(step + 1) * rows)
        .map(|index| source.sample(index))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(collate(&samples, Device::Cpu)?)
}

fn train(config: &Config, number: usize) -> Result<Trained, Box<dyn Error>> {
    let world = World::single_rank(trainyard_trace::Ledger::new(0))?;
    let model = replicas(config, number)?;
    let parameters = model.model().parameters();
    let mut optimizer = optimizer::build(&config.into(), parameters.clone(), &world)?;
    let mut losses = Vec::new();
    for step in 0..NUM_STEPS {
        let batch = batch(config, step, 12)?;
        let loss = model.step(&batch.inputs, &batch.targets, step)?;
        losses.push(f64::try_from(loss)?);
        optimizer.step(config.optimizer.lr)?;
        for parameter in &parameters {
            autograd::clear_grad(parameter.tensor())?;
        }
    }
    Ok((losses, values(&parameters)))
}

pub fn equal_one(_: &Rank) -> Outcome {
    let config = debug_llama(Dtype::Float64);
    let (expected_losses, expected) = train(&config, 1)?;
    assert!(
        expected_losses[NUM_STEPS as usize - 1] < expected_losses[0] - 0.1,
        "it does not learn"
    );
    for number in [2, 3] {
        let (losses, parameters) = train(&config, number)?;
        trainyard_conformance::training::assert_close("loss", &losses, &expected_losses, 1e-9);
        for (name, expected) in &expected {
            let off = distance(&parameters[name], expected);
            assert!(
                off <= 1e-9,
                "{name} is off by {off:e} with {number} threads"
            );
        }
    }
    Ok(())
}

pub fn indivisible(_: &Rank) -> Outcome {
    let config = debug_llama(Dtype::Float64);
    let batch = batch(&config, 0, 5)?;
    let rejected = replicas(&config, 2)?.step(&batch.inputs, &batch.targets, 0);
    assert!(matches!(
        rejected,
        Err(ParallelError::Indivisible {
            rows: 5,
            num_replicas: 2
        })
    ));
    Ok(())
}

pub fn broken_replica(_: &Rank) -> Outcome {
    let config = debug_llama(Dtype::Float64);
    let (good, seq_len) = (shape(&config)?, config.training.seq_len);
    let bad = DecoderConfig {
        head_dim: 3,
        ..good.clone()
    };
    let model = Decoder::build(&good, seq_len, &Builder::new(1).kind(Kind::Double))?;
    let parallel = DataParallel::new(model, 2, move |_| {
        Decoder::build(&bad, seq_len, &Builder::new(1))
    })?;
    let batch = batch(&config, 0, 4)?;
    let rejected = parallel.step(&batch.inputs, &batch.targets, 0);
    assert!(
        matches!(rejected, Err(ParallelError::Nn(NnError::Arch(_)))),
        "{rejected:?}"
    );
    Ok(())
}
