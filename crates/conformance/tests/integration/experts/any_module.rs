//! Experts of one's own: a norm and two layers with GELU and biases each.

use std::error::Error;
use std::time::Duration;

use tch::{Kind, Tensor};
use trainyard_arch::MoeConfig;
use trainyard_conformance::training::distance;
use trainyard_conformance::{Outcome, Rank, device};
use trainyard_cost::Stage;
use trainyard_mesh::{Axis, AxisSet, Mesh};
use trainyard_nn::{
    Builder, Context, ExpertParallel, Experts, Init, MixtureOfExperts, Model, Module, Parameter,
    Unit, for_each_expert,
};
use trainyard_optim::{Optimizer, Sgd};
use trainyard_parallel::{DataParallelWrapper, FullyShard, GradSync};
use trainyard_torch::World;
use trainyard_trace::Ledger;

use crate::convolutions::{SGD, shard_options};

const WIDTH: usize = 6;
const INNER: usize = 10;
const NUM_EXPERTS: usize = 4;
const NUM_STEPS: u64 = 3;
const NUM_POSITIONS: i64 = 5;

#[derive(Module, Debug)]
struct NormedExperts {
    norm: Parameter,
    up: Parameter,
    up_bias: Parameter,
    down: Parameter,
}

impl NormedExperts {
    fn build(builder: &Builder) -> trainyard_nn::Result<NormedExperts> {
        let init = Init::fan_in(WIDTH);
        Ok(NormedExperts {
            norm: builder.experts("norm", &[NUM_EXPERTS, WIDTH], Init::Ones)?,
            up: builder.experts("up", &[NUM_EXPERTS, INNER, WIDTH], init)?,
            up_bias: builder.experts("up_bias", &[NUM_EXPERTS, INNER], init)?,
            down: builder.experts("down", &[NUM_EXPERTS, WIDTH, INNER], init)?,
        })
    }
}

impl Experts for NormedExperts {
    fn forward(&self, x: &Tensor, num_rows: &[i64]) -> trainyard_nn::Result<Tensor> {
        let (norm, up) = (self.norm.value()?, self.up.value()?);
        let (bias, down) = (self.up_bias.value()?, self.down.value()?);
        for_each_expert(x, num_rows, |expert, rows| {
            let of = |all: &Tensor| all.f_select(0, expert);
            let normed = rows.f_layer_norm(
                WIDTH as i64,
                Some(&of(&norm)?),
                None::<&Tensor>,
                1e-5,
                false,
            )?;
            let inner = normed
                .f_linear(&of(&up)?, Some(&of(&bias)?))?
                .f_gelu("none")?;
            Ok(inner.f_linear(&of(&down)?, None::<&Tensor>)?)
        })
    }
}

/// One layer of experts with a residual connection.
#[derive(Module)]
struct Mixture {
    layer: MixtureOfExperts,
}

impl Mixture {
    fn build(world: &World) -> trainyard_nn::Result<Mixture> {
        let alone = world.group(AxisSet::of([Axis::Cp, Axis::Tp]))?;
        let builder = Builder::new(3)
            .kind(Kind::Double)
            .device(device().into())
            .with_expert_parallel(ExpertParallel::new(&world.group(Axis::Ep)?, &alone));
        let config = MoeConfig::plain(NUM_EXPERTS, 2, INNER);
        let experts = Box::new(NormedExperts::build(&builder.push("experts"))?);
        let init = Init::fan_in(WIDTH);
        let layer = MixtureOfExperts::with_experts(&builder, 0, WIDTH, &config, init, experts)?;
        Ok(Mixture { layer })
    }
}

impl Model for Mixture {
    fn units(&self) -> Vec<&dyn Unit> {
        vec![self]
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> trainyard_nn::Result<Tensor> {
        Ok(output.f_sub(targets)?.f_square()?.f_sum(Kind::Double)?)
    }
}

impl Unit for Mixture {
    fn name(&self) -> &str {
        "layer"
    }

    fn forward(&self, x: &Tensor, cx: &Context) -> trainyard_nn::Result<Tensor> {
        Ok(x.f_add(&self.layer.forward(x, cx)?)?)
    }
}

/// Inputs of some samples of a step, and their targets.
fn batch(samples: std::ops::Range<i64>, step: u64) -> (Tensor, Tensor) {
    let shape = [samples.end - samples.start, NUM_POSITIONS, WIDTH as i64];
    let first = samples.start * NUM_POSITIONS * WIDTH as i64;
    let count = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, device()));
    let x = ((count + first + 1000 * step as i64) * 0.71)
        .sin()
        .view(shape);
    let target = (&x * 2.0).cos();
    (x, target)
}

/// Trains on some samples of every batch, and returns the output of an evaluation.
fn trained(
    model: &dyn DataParallelWrapper,
    samples: std::ops::Range<i64>,
) -> Result<Tensor, Box<dyn Error>> {
    let mut sgd = Sgd::new(model.parameters(), SGD);
    for step in 0..NUM_STEPS {
        model.zero_grad()?;
        let (x, target) = batch(samples.clone(), step);
        let run = model.forward(&x, &Context::training(step))?;
        let loss = model.loss(run.output(), &target)? / 100.0;
        model.backward(run, &loss, GradSync::Full)?;
        sgd.step(0.1)?;
    }
    let (x, _) = batch(0..8, 99);
    let output = tch::no_grad(|| model.forward(&x, &Context::evaluation(NUM_STEPS)))?;
    Ok(output.into_output().to_device(tch::Device::Cpu))
}

/// Experts on different ranks, in every ZeRO stage, equal one rank with the whole batch.
pub fn equal_one_rank(rank: &Rank) -> Outcome {
    let alone = World::single_rank(Ledger::new(0))?;
    let options = || shard_options(Stage::OptimizerStates);
    let expected = trained(
        &FullyShard::new(Mixture::build(&alone)?, &alone, options())?,
        0..8,
    )?;
    let mesh = Mesh::new(&[(Axis::DpShard, rank.size())])?.with_ep(2)?;
    let world = rank.join(mesh, Ledger::new(rank.index()), Duration::from_secs(30))?;
    let share = 8 / rank.size() as i64;
    let first = rank.index() as i64 * share;
    for stage in [Stage::OptimizerStates, Stage::Gradients, Stage::Parameters] {
        let model = FullyShard::new(Mixture::build(&world)?, &world, shard_options(stage))?;
        let found = trained(&model, first..first + share)?;
        let off = distance(&found, &expected);
        rank.note(format!("{stage:?} {off:.1e}"));
        assert!(off < 1e-9, "{stage:?}: {off:e}");
    }
    Ok(())
}
