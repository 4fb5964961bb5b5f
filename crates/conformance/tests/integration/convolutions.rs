//! A small model with BatchNorm, its batches, and how they are trained.

use std::collections::BTreeMap;
use std::error::Error;
use std::rc::Rc;
use std::time::Duration;

use tch::{Device, Kind, Tensor};
use trainyard_conformance::training::distance;
use trainyard_conformance::{Outcome, Rank, device};
use trainyard_cost::Stage;
use trainyard_mesh::{Axis, Mesh};
use trainyard_nn::layers::{BatchNorm, Conv2d};
use trainyard_nn::{Builder, Context, Model, Module, Parameter, Unit, cross_entropy_sum};
use trainyard_optim::SgdConfig;
use trainyard_parallel::{DataParallelWrapper, DdpOptions, FullyShard, ShardOptions};
use trainyard_torch::{Group, ReduceOp, World};
use trainyard_trace::Ledger;

pub const NUM_CHANNELS: usize = 3;
pub const NUM_CLASSES: usize = 4;
pub const SIDE: i64 = 5;
pub const SGD: SgdConfig = SgdConfig {
    momentum: 0.9,
    nesterov: false,
    weight_decay: 0.0,
};

/// Convolutions with BatchNorm and ReLU; the mean of every channel is a logit.
#[derive(Module)]
pub struct Convolutions {
    blocks: Vec<Block>,
}

#[derive(Module)]
struct Block {
    name: String,
    conv: Conv2d,
    norm: BatchNorm,
    is_last: bool,
}

impl Convolutions {
    /// With norms over the batches of `group`, or over the rank's own.
    pub fn build(group: Option<&Group>, device: Device) -> trainyard_nn::Result<Convolutions> {
        let builder = Builder::new(7).kind(Kind::Double).device(device.into());
        let channels = [1, NUM_CHANNELS, NUM_CHANNELS, NUM_CLASSES];
        let block = |(index, window): (usize, &[usize])| {
            let builder = builder.push(&format!("blocks.{index}"));
            let norm = BatchNorm::build(&builder.push("norm"), window[1])?;
            Ok(Block {
                name: builder.path().to_owned(),
                conv: Conv2d::build(&builder.push("conv"), window[0], window[1], 3)?,
                norm: match group {
                    Some(group) => norm.synchronized(group),
                    None => norm,
                },
                is_last: window[1] == NUM_CLASSES,
            })
        };
        let blocks = channels.windows(2).enumerate().map(block);
        Ok(Convolutions {
            blocks: blocks.collect::<trainyard_nn::Result<_>>()?,
        })
    }
}

impl Model for Convolutions {
    fn units(&self) -> Vec<&dyn Unit> {
        self.blocks.iter().map(|block| block as &dyn Unit).collect()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> trainyard_nn::Result<Tensor> {
        cross_entropy_sum(output, targets)
    }
}

impl Unit for Block {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, cx: &Context) -> trainyard_nn::Result<Tensor> {
        let normed = self.norm.forward(&self.conv.forward(x)?, cx)?;
        Ok(if self.is_last {
            normed.f_mean_dim([2i64, 3].as_slice(), false, normed.kind())?
        } else {
            normed.f_relu()?
        })
    }
}

/// The rows and classes of a rank in a step: one row more than the rank before has.
pub fn batch(index: usize, step: u64) -> (Tensor, Tensor) {
    let num_rows = 2 + index as i64;
    let shape = [num_rows, 1, SIDE, SIDE];
    let first = 1000.0 * index as f64 + 100.0 * step as f64;
    let count = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    // Every rank has another mean and another scale.
    let x = ((count + first) * 0.37).sin() * (1.0 + index as f64) + index as f64;
    let classes = Tensor::arange(num_rows, (Kind::Int64, Device::Cpu)) + step as i64;
    (x.view(shape), classes.remainder(NUM_CLASSES as i64))
}

/// Rows of all ranks in a step.
pub fn num_rows(num_ranks: usize) -> f64 {
    (0..num_ranks).map(|index| 2.0 + index as f64).sum()
}

/// One input for all ranks.
pub fn probe() -> Tensor {
    batch(2, 77).0
}

/// The largest relative distance of two states.
pub fn largest_distance(
    found: &BTreeMap<String, Tensor>,
    expected: &BTreeMap<String, Tensor>,
) -> f64 {
    assert!(!found.is_empty());
    let distances = found
        .iter()
        .map(|(name, found)| distance(found, &expected[name]));
    distances.fold(0.0, f64::max)
}

/// Losses are divided by the global number of rows.
pub fn ddp_options() -> DdpOptions {
    DdpOptions {
        op: ReduceOp::Sum,
        ..DdpOptions::default()
    }
}

/// A new world in which all ranks shard.
pub fn sharded(rank: &Rank) -> Result<Rc<World>, Box<dyn Error>> {
    let mesh = Mesh::new(&[(Axis::DpShard, rank.size())])?;
    Ok(rank.join(mesh, Ledger::new(rank.index()), Duration::from_secs(30))?)
}

/// Losses are divided by the global number of rows.
pub fn shard_options(stage: Stage) -> ShardOptions {
    ShardOptions {
        stage,
        op: ReduceOp::Sum,
        ..ShardOptions::default()
    }
}

/// Calls `check` with the model under every stage of ZeRO, with norms over the batches of all ranks: the wrapped model, the
/// group of all ranks, and the parameters that a rank has in full. The evaluation of a model compares those that are sharded.
pub fn for_each_stage(
    rank: &Rank,
    check: impl Fn(&dyn DataParallelWrapper, &Group, &[Parameter]) -> Outcome,
) -> Outcome {
    let world = sharded(rank)?;
    let group = world.world_group()?;
    for stage in [Stage::OptimizerStates, Stage::Gradients, Stage::Parameters] {
        let model = Convolutions::build(Some(&group), device())?;
        let mut full = model.parameters();
        full.retain(|p| stage != Stage::Parameters || p.is_running_stat());
        let model = FullyShard::new(model, &world, shard_options(stage))?;
        check(&model, &group, &full)?;
    }
    Ok(())
}
