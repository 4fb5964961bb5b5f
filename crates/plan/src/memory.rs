//! Will it fit: the bytes of every kind of rank, term by term.

use crate::activations::tokens;
use crate::pipeline::in_flight;
use crate::{BlockActivations, Figure, Holding, RankClass, Shape, Software, States, Strategy};

/// The bytes of one kind of rank.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Memory {
    /// Which ranks.
    pub class: RankClass,
    /// Parameters, gradients, optimiser.
    pub states: States,
    /// What blocks keep for backward, of all micro-batches in flight.
    pub activations: f64,
    /// What one block has while it goes backward, where it computes again.
    pub computed_again: f64,
    /// What the embedding keeps.
    pub embedding: f64,
    /// Logits and the loss.
    pub logits: f64,
    /// Messages that wait to be sent or used.
    pub buffers: f64,
    /// The driver's, the libraries' and what lies between tensors.
    pub overhead: f64,
}

impl Memory {
    /// All of it.
    pub const fn total(&self) -> f64 {
        self.states.on_device()
            + self.activations
            + self.computed_again
            + self.embedding
            + self.logits
            + self.buffers
            + self.overhead
    }
}

/// What no tensor accounts for.
#[derive(Clone, Debug, PartialEq)]
pub struct Overheads {
    /// Bytes of the driver's context, of libraries' workspaces and of communicators.
    pub context: Figure,
    /// What is lost beside tensors, as a share of them.
    pub fragmentation: Figure,
}

impl Overheads {
    /// Nothing: to set tensors beside tensors.
    pub fn none() -> Overheads {
        let nothing = || Figure::assumed(0.0, "tensors alone are counted");
        Overheads {
            context: nothing(),
            fragmentation: nothing(),
        }
    }

    /// What a driver reported of Megatron-DeepSpeed's ranks in 2022, over what their tensors take: caches,
    /// buckets of half a billion elements and what lies between blocks included.
    pub fn deepspeed_2022() -> Overheads {
        Overheads {
            fragmentation: Figure::measured(
                0.29,
                "BLOOM's trial runs in 16 bits with full recomputation, bigscience \
                 tr11-176B-ml/chronicles-prequel.md",
            ),
            ..Overheads::default()
        }
    }
}

impl Default for Overheads {
    fn default() -> Overheads {
        Overheads {
            context: Figure::assumed(
                2.0 * GIB,
                "a CUDA context, workspaces and a few communicators take one to three GiB",
            ),
            fragmentation: Figure::assumed(0.05, "what Megatron's own estimate adds"),
        }
    }
}

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// A bucket of gradients, as PyTorch cuts them; two are on their way at once.
const BUCKET: f64 = 25.0 * 1024.0 * 1024.0;

/// The bytes of every kind of rank.
pub fn memory(
    shape: &Shape,
    strategy: &Strategy,
    software: &Software,
    overheads: &Overheads,
) -> Vec<Memory> {
    let holdings = strategy.holdings(shape);
    let each = holdings.iter();
    each.map(|holding| of_rank(shape, strategy, software, overheads, holding))
        .collect()
}

/// The rank that needs most.
pub fn peak(memories: &[Memory]) -> Option<&Memory> {
    let by_total = |a: &&Memory, b: &&Memory| a.total().total_cmp(&b.total());
    memories.iter().max_by(by_total)
}

fn of_rank(
    shape: &Shape,
    strategy: &Strategy,
    software: &Software,
    overheads: &Overheads,
    holding: &Holding,
) -> Memory {
    let states = States::of(shape, strategy, holding);
    let dense = BlockActivations::of(shape, strategy, software, false);
    let sparse = BlockActivations::of(shape, strategy, software, true);
    let kept = holding.num_dense as f64 * dense.kept(strategy.recompute)
        + holding.num_sparse as f64 * sparse.kept(strategy.recompute);
    let flights = flights(strategy, holding.rank);
    let again = match holding.num_sparse {
        0 => dense.computed_again(strategy.recompute),
        _ => sparse.computed_again(strategy.recompute),
    };
    let activations = kept * flights;
    let (embedding, logits) = ends(shape, strategy, software, holding, flights);
    let buffers = buffers(strategy, dense.input);
    let mut memory = Memory {
        class: holding.class,
        states,
        activations,
        computed_again: again,
        embedding,
        logits,
        buffers,
        overhead: 0.0,
    };
    let lost = overheads.fragmentation.value * memory.total();
    memory.overhead = overheads.context.value + lost;
    memory
}

/// How many micro-batches' worth of a rank's blocks are kept at once.
fn flights(strategy: &Strategy, rank: usize) -> f64 {
    let layers = &strategy.layers;
    let chunks = layers.stages_per_rank;
    let held = in_flight(
        layers.schedule,
        strategy.degrees.pp,
        strategy.num_microbatches(),
        chunks,
        rank,
    );
    match strategy.degrees.pp {
        1 => 1.0,
        _ => held as f64 / chunks as f64,
    }
}

/// What embedding and head keep. Logits are there in the layers' type, in 32 bits, and once more as their
/// gradient; the loss is computed for one micro-batch at a time.
fn ends(
    shape: &Shape,
    strategy: &Strategy,
    software: &Software,
    holding: &Holding,
    flights: f64,
) -> (f64, f64) {
    let tokens = tokens(strategy);
    let tp = strategy.degrees.tp as f64;
    let between = if strategy.sequence_parallel { tp } else { 1.0 };
    let bytes = strategy.precision.compute as f64;
    let hidden = shape.hidden_size as f64;
    let mask = if software.dropout {
        hidden / between
    } else {
        0.0
    };
    let embedding = match holding.has_embedding {
        true => flights * tokens * (8.0 + mask),
        false => 0.0,
    };
    let logits = match holding.has_head {
        true => {
            let vocab = shape.vocab_size as f64 / tp;
            tokens * (vocab * (bytes + 8.0) + 2.0 * hidden * bytes / between)
        }
        false => 0.0,
    };
    (embedding, logits)
}

/// Buckets of gradients, and what a pipeline sends and receives.
fn buffers(strategy: &Strategy, message: f64) -> f64 {
    let degrees = &strategy.degrees;
    let buckets = if degrees.data_parallel() * degrees.cp > 1 {
        2.0 * BUCKET
    } else {
        0.0
    };
    let messages = if degrees.pp > 1 { 4.0 * message } else { 0.0 };
    buckets + messages
}
