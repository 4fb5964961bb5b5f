//! Distributed data parallelism (DDP) with a custom model and training loop.
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/ddp
//! ```
//!
//! It also runs without the launcher, on one rank, and computes the same: the global batch is divided over
//! all ranks. Comments show the corresponding PyTorch calls.

use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::parallel::{DataParallelWrapper, Ddp, DdpOptions, GradSync, Strategy};
use trainyard::tch::{
    self, Reduction,
    nn::{self, Module as _},
};
use trainyard::{
    Context, Device, Kind, Model, Module, Purpose, ReduceOp, Result, Tensor, UnitFn, VarStoreModel,
    World,
};

const STEPS: u64 = 60;
const GLOBAL_BATCH: i64 = 240;
const LEARNING_RATE: f64 = 0.01;

fn main() -> Result<()> {
    let world = trainyard::init()?; // dist.init_process_group("gloo")
    let world_group = world.world_group()?; // dist.group.WORLD

    // DistributedDataParallel(model): rank 0 broadcasts its weights.
    let model = Ddp::new(classifier()?, &world_group, DdpOptions::default())?;
    let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default()); // optim.AdamW

    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (points, labels) = batch(step, &world); // DistributedSampler
        let run = model.forward(&points, &Context::training(step))?; // model(points)
        let loss = model.loss(run.output(), &labels)? / labels.size()[0] as f64;
        model.backward(run, &loss, GradSync::Full)?; // loss.backward()
        optimizer.step(LEARNING_RATE)?; // optimizer.step()
        model.zero_grad()?; // optimizer.zero_grad()

        let mean = loss.detach();
        world_group // dist.all_reduce(mean, op=ReduceOp.AVG)
            .all_reduce(&mean, ReduceOp::Mean, Purpose::Control)?
            .wait()?;
        losses.push(f64::try_from(&mean)?);
        if world.rank() == 0 {
            println!("step {step} loss {:.6}", losses[losses.len() - 1]);
        }
    }
    if losses[losses.len() - 1] > 0.5 * losses[0] {
        eprintln!("the loss did not decrease: {losses:?}");
        std::process::exit(1);
    }
    Ok(())
}

/// A plain `tch` model. Its layers become units, the granularity of strategies.
fn classifier() -> Result<VarStoreModel> {
    tch::manual_seed(1);
    let store = nn::VarStore::new(Device::Cpu);
    let hidden = nn::linear(store.root() / "hidden", 2, 64, Default::default());
    let output = nn::linear(store.root() / "output", 64, 2, Default::default());
    let units: Vec<(&str, UnitFn)> = vec![
        ("hidden", Box::new(move |x, _| hidden.forward(x).tanh())),
        ("output", Box::new(move |x, _| output.forward(x))),
    ];
    // The sum over the targets, not the mean: the training loop divides.
    let loss = |output: &Tensor, labels: &Tensor| {
        output.cross_entropy_loss::<Tensor>(labels, None, Reduction::Sum, -100, 0.0)
    };
    Ok(VarStoreModel::new(&store, units, Box::new(loss))?)
}

/// This rank's part of the global batch: points in a square, labeled by quadrant (XOR).
fn batch(step: u64, world: &World) -> (Tensor, Tensor) {
    tch::manual_seed(1000 + step as i64);
    let points = Tensor::rand([GLOBAL_BATCH, 2], (Kind::Float, Device::Cpu)) * 2.0 - 1.0;
    let own = &points.chunk(world.size() as i64, 0)[world.rank()];
    let labels = own.prod_dim_int(1, false, Kind::Float).gt(0.0);
    (own.shallow_clone(), labels.to_kind(Kind::Int64))
}
