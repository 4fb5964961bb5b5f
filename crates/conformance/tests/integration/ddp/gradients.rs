//! The storage of gradients, and the initial weights.

use std::error::Error;

use tch::Tensor;
use trainyard_config::{Config, Dtype};
use trainyard_conformance::training::{debug_llama, divided, fingerprint};
use trainyard_conformance::{Outcome, Rank, device};
use trainyard_data::collate;
use trainyard_nn::{Context, Model, Module};
use trainyard_parallel::{BucketLimits, DataParallelWrapper, Ddp, DdpOptions, GradSync, Strategy};
use trainyard_torch::{ReduceOp, storage};
use trainyard_train::build;

type Wrapped = Ddp<Box<dyn Model>>;

fn wrap(rank: &Rank, config: &Config, buckets: BucketLimits) -> Result<Wrapped, Box<dyn Error>> {
    let options = DdpOptions {
        op: ReduceOp::Sum,
        buckets,
        ..DdpOptions::default()
    };
    let world = rank.world()?;
    let group = world.world_group()?;
    Ok(Ddp::new(
        build::model(&config.into(), &world, world.device().into())?,
        &group,
        options,
    )?)
}

fn backward(model: &Wrapped, config: &Config, sync: GradSync) -> Outcome {
    let source = build::source(&config.into(), build::Phase::Training)?;
    let samples = (0..2)
        .map(|i| source.sample(i))
        .collect::<Result<Vec<_>, _>>()?;
    let batch = collate(&samples, device())?;
    let run = model.forward(&batch.inputs, &Context::training(0))?;
    let loss = model.loss(run.output(), &batch.targets)?;
    model.backward(run, &loss, sync)?;
    Ok(())
}

/// One gradient per storage, and the bytes of all gradients.
fn storages(model: &Wrapped) -> Result<(Vec<Tensor>, usize), Box<dyn Error>> {
    let mut distinct: Vec<Tensor> = Vec::new();
    let mut bytes = 0;
    for parameter in model.parameters() {
        let gradient = parameter.tensor().grad();
        bytes += gradient.numel() * gradient.kind().elt_size_in_bytes();
        let mut known = false;
        for other in &distinct {
            known |= storage::is_shared(other, &gradient)?;
        }
        if !known {
            distinct.push(gradient);
        }
    }
    Ok((distinct, bytes))
}

fn assert_in_buckets(model: &Wrapped, num_buckets: impl Fn(usize) -> bool) -> Outcome {
    let (storages, bytes) = storages(model)?;
    assert!(num_buckets(storages.len()), "{} buckets", storages.len());
    let mut held = 0;
    for each in &storages {
        held += storage::bytes(each)?;
    }
    assert_eq!(held, bytes, "buckets hold gradients and nothing else");
    Ok(())
}

pub fn views(rank: &Rank) -> Outcome {
    let config = divided(&debug_llama(Dtype::Float32), rank.size(), 1);
    let one = wrap(rank, &config, BucketLimits::default())?;
    let many = wrap(
        rank,
        &config,
        BucketLimits {
            first: 1,
            rest: 1 << 16,
        },
    )?;
    for _ in 0..2 {
        backward(&one, &config, GradSync::Full)?;
        assert_in_buckets(&one, |number| number == 1)?;
        backward(&many, &config, GradSync::Full)?;
        assert_in_buckets(&many, |number| number > 3)?;
        // The gradients of the next step use the same storage.
        one.zero_grad()?;
        many.zero_grad()?;
        assert!(
            one.parameters()
                .iter()
                .all(|p| !p.tensor().grad().defined())
        );
    }
    Ok(())
}

/// Two accumulated micro-batches and a reduced one: three times the gradient of one, on every rank.
pub fn accumulated_views(rank: &Rank) -> Outcome {
    let config = divided(&debug_llama(Dtype::Float64), rank.size(), 1);
    let model = wrap(rank, &config, BucketLimits::default())?;
    backward(&model, &config, GradSync::ShardOnly)?;
    assert_in_buckets(&model, |number| number == 1)?;
    let once: Vec<Tensor> = model
        .parameters()
        .iter()
        .map(|p| p.tensor().grad().copy())
        .collect();
    backward(&model, &config, GradSync::ShardOnly)?;
    backward(&model, &config, GradSync::Full)?;
    assert_in_buckets(&model, |number| number == 1)?;
    for (parameter, once) in model.parameters().iter().zip(once) {
        let expected = once * (3 * rank.size()) as f64;
        let off = trainyard_conformance::training::distance(&parameter.tensor().grad(), &expected);
        assert!(off < 1e-12, "{} is off by {off:e}", parameter.name());
    }
    Ok(())
}

pub fn first_weights(rank: &Rank) -> Outcome {
    let mut config = debug_llama(Dtype::Float32);
    config.debug.seed = 1 + rank.index() as u64;
    let prints = |model: &dyn Module| -> Vec<u64> {
        model
            .parameters()
            .iter()
            .map(|p| fingerprint(p.tensor()))
            .collect()
    };
    let own = prints(&build::model(
        &(&config).into(),
        &*rank.world()?,
        device().into(),
    )?);
    let before = rank.all_gather(&own)?;
    assert!(before[0] != before[1], "the ranks began alike");
    let wrapped = wrap(
        rank,
        &config,
        BucketLimits {
            first: 1 << 12,
            rest: 1 << 16,
        },
    )?;
    let after = rank.all_gather(&prints(&wrapped))?;
    assert!(after.iter().all(|each| *each == before[0]));
    Ok(())
}
