//! The hot paths of a training step, for `bench/instructions`, which counts their instructions with callgrind.
//!
//! Every path runs a few times before [`start_of_path`] and a known number of times before [`end_of_path`], where
//! callgrind starts and ends counting. Steps run on meta tensors with a fake process group: what remains is the work of
//! the host, which a GPU would wait for.

use std::error::Error;
use std::hint::black_box;

use tch::Kind;
use trainyard_config::{Config, Dtype};
use trainyard_conformance::training::{debug_llama, divided};
use trainyard_data::{Batch, Order, SampleStream};
use trainyard_nn::Device;
use trainyard_torch::World;
use trainyard_trace::{Collective, CollectiveKind, Ledger, OnDevice, Purpose};
use trainyard_train::build::{self, Phase};
use trainyard_train::{Trainer, data_axes};

/// How often a path runs while its instructions are counted.
const NUM_RUNS: usize = 20;

type Path = Box<dyn FnMut() -> Result<(), Box<dyn Error>>>;

fn main() -> Result<(), Box<dyn Error>> {
    type Build = fn() -> Result<Path, Box<dyn Error>>;
    let paths: [(&str, Build); 7] = [
        ("ledger: record of a collective", ledger),
        ("loader: batch of 24 sequences", loader),
        ("step: one rank", || step(1, |_| ())),
        ("step: DDP, reduction of buckets", || step(2, |_| ())),
        ("step: ZeRO 3, unshard and reshard", || {
            step(2, |config| {
                config.parallelism.data_parallel_shard_degree = 2
            })
        }),
        ("step: tensor and sequence parallel", || {
            step(2, |config| config.parallelism.tensor_parallel_degree = 2)
        }),
        ("step: pipeline of two stages, 1F1B", || {
            step(2, |config| config.parallelism.pipeline_parallel_degree = 2)
        }),
    ];
    for (name, build) in paths {
        let mut path = build()?;
        for _ in 0..3 {
            path()?;
        }
        start_of_path();
        for _ in 0..NUM_RUNS {
            path()?;
        }
        end_of_path();
        println!("{NUM_RUNS} {name}");
    }
    Ok(())
}

#[inline(never)]
fn start_of_path() {
    black_box("callgrind starts to count here");
}

#[inline(never)]
fn end_of_path() {
    black_box("callgrind ends counting here");
}

fn ledger() -> Result<Path, Box<dyn Error>> {
    let ledger = Ledger::new(0);
    Ok(Box::new(move || {
        let handle = ledger.begin(Collective {
            kind: CollectiveKind::AllReduce,
            group: "dp_replicate".to_owned(),
            group_size: 2,
            sequence: 1,
            purpose: Purpose::Gradient,
            dtype: "float32".to_owned(),
            payload_bytes: 4096,
            sent_bytes: 4096,
            issued_ns: 1,
            started_ns: 2,
            ended_ns: 0,
            waited: None,
        });
        ledger.finish(handle, OnDevice::default(), |collective| {
            collective.ended_ns = 3
        });
        Ok(())
    }))
}

fn loader() -> Result<Path, Box<dyn Error>> {
    let config = debug_llama(Dtype::Float32);
    let samples = SampleStream {
        source: build::source(&(&config).into(), Phase::Training)?,
        order: Order::Sequential,
        device: tch::Device::Cpu,
    };
    let mut next = 0;
    Ok(Box::new(move || {
        black_box(samples.batch(next..next + 24)?);
        next += 24;
        Ok(())
    }))
}

/// A step with two micro-batches on meta tensors.
fn step(num_ranks: usize, parallelize: fn(&mut Config)) -> Result<Path, Box<dyn Error>> {
    let mut config = debug_llama(Dtype::Float32);
    parallelize(&mut config);
    let mesh = config.mesh(num_ranks)?;
    let config = divided(&config, mesh.size_of(data_axes()), 2);
    let world = World::fake(mesh, 0, Ledger::new(0))?;
    let mut trainer = Trainer::new(&(&config).into(), &world, Device::Meta)?;
    let rows = trainer.batching().local;
    let batch = || -> Result<Batch, Box<dyn Error>> {
        let tokens = || Device::Meta.empty(&[rows, config.training.seq_len], Kind::Int64);
        Ok(Batch::new(
            tokens()?,
            tokens()?,
            (rows * config.training.seq_len) as i64,
        ))
    };
    let batches = [batch()?, batch()?];
    Ok(Box::new(move || {
        // The groups of the trainer live as long as the world.
        let _world = &world;
        trainer.step(&batches)?;
        Ok(())
    }))
}
