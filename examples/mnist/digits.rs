//! What the programs of this directory share: the digits, the network, and its accuracy on held-out digits.

use std::sync::OnceLock;
use std::time::Instant;

use trainyard::data::{Mnist, Source, Split, collate};
use trainyard::nn::{self, UnitFn};
use trainyard::tch::nn::{Module as _, VarStore, conv2d, linear};
use trainyard::torch::memory;
use trainyard::{
    Axis, AxisSet, Context, Device, Kind, Result, Tensor, VarStoreModel, World, cross_entropy_sum,
    tch,
};

pub const BATCH: i64 = 32;
pub const STEPS: u64 = 750; // three epochs of 8,000 digits

/// When the network was built, which is when training begins.
static START: OnceLock<Instant> = OnceLock::new();

/// Falls linearly to zero.
pub fn learning_rate(step: u64) -> f64 {
    3e-3 * (1.0 - step as f64 / STEPS as f64)
}

/// One split of the digits, in memory.
pub struct Digits {
    images: Tensor,
    labels: Tensor,
}

impl Digits {
    /// Reads a split from the directory that the program got as its argument, or from `data/mnist`.
    pub fn open(split: Split) -> Result<Digits> {
        let folder = std::env::args().nth(1);
        let digits = Mnist::open(folder.as_deref().unwrap_or("data/mnist"), split)?;
        let samples = (0..digits.len().unwrap_or(0)).map(|index| digits.sample(index));
        let all = collate(&samples.collect::<Result<Vec<_>, _>>()?, Device::Cpu)?;
        Ok(Digits {
            images: all.inputs,
            labels: all.targets,
        })
    }

    /// Part `index` of `num_parts` of the batch of a step.
    pub fn batch(&self, step: u64, index: usize, num_parts: usize) -> (Tensor, Tensor) {
        let num_batches = self.labels.size()[0] / BATCH;
        let first = (step as i64 % num_batches) * BATCH;
        let part = |all: &Tensor| {
            let batch = all.narrow(0, first, BATCH);
            batch.chunk(num_parts as i64, 0).swap_remove(index)
        };
        (part(&self.images), part(&self.labels))
    }
}

/// Two convolutions and two linear layers, with the same weights on every rank.
pub fn cnn() -> nn::Result<VarStoreModel> {
    START.get_or_init(Instant::now);
    memory::observe(); // from here on: parameters, gradients, optimizer states and activations
    tch::manual_seed(1);
    let vs = VarStore::new(Device::Cpu);
    let conv1 = conv2d(vs.root() / "conv1", 1, 16, 3, Default::default());
    let conv2 = conv2d(vs.root() / "conv2", 16, 32, 3, Default::default());
    let fc1 = linear(vs.root() / "fc1", 32 * 5 * 5, 128, Default::default());
    let fc2 = linear(vs.root() / "fc2", 128, 10, Default::default());
    let units: Vec<(&str, UnitFn)> = vec![
        (
            "conv1",
            Box::new(move |x, _| conv1.forward(x).relu().max_pool2d_default(2)),
        ),
        (
            "conv2",
            Box::new(move |x, _| conv2.forward(x).relu().max_pool2d_default(2)),
        ),
        (
            "fc1",
            Box::new(move |x, _| fc1.forward(&x.flatten(1, -1)).relu()),
        ),
        ("fc2", Box::new(move |x, _| fc2.forward(x))),
    ];
    let loss =
        |output: &Tensor, labels: &Tensor| cross_entropy_sum(output, labels).expect("logits");
    VarStoreModel::new(&vs, units, Box::new(loss))
}

/// Prints the share of held-out digits that are recognized, with what training cost this rank, and fails if it is less than
/// 97 %. `logits` returns none on ranks that do not know; the first of the others prints.
pub fn report(
    world: Option<&World>,
    logits: impl Fn(&Tensor, &Context) -> Result<Option<Tensor>>,
) -> Result<()> {
    let (seconds, peak) = (START.get().map(Instant::elapsed), memory::report()?.peak);
    let sent_bytes = world.map_or(0, |world| {
        world.ledger().totals().all_collectives().sent_bytes
    });
    let digits = Digits::open(Split::Test)?;
    let cx = Context::evaluation(STEPS);
    let Some(logits) = tch::no_grad(|| logits(&digits.images, &cx))? else {
        return Ok(());
    };
    let is_right = logits.argmax(1, false).eq_tensor(&digits.labels);
    let accuracy = 100.0 * f64::try_from(is_right.to_kind(Kind::Double).mean(Kind::Double))?;
    let prints = match world {
        Some(world) => {
            let same_stage = AxisSet::of([Axis::DpReplicate, Axis::DpShard, Axis::Tp]);
            world.group(same_stage)?.index() == 0
        }
        None => true,
    };
    if prints {
        println!(
            "accuracy {accuracy:.2} %, {:.1} s, {:.1} MB sent, peak memory {:.1} MB",
            seconds.unwrap_or_default().as_secs_f64(),
            sent_bytes as f64 / 1e6,
            peak as f64 / 1e6,
        );
    }
    if accuracy < 97.0 {
        eprintln!("less than 97 %");
        std::process::exit(1);
    }
    Ok(())
}
