//! Peak memory of every class of ranks, term by term.

use crate::activations::tokens;
use crate::{BlockActivations, RankClass, RankLayers, Software, SourcedValue, States, Strategy};
use trainyard_arch::DecoderConfig;
use trainyard_schedule::in_flight;

/// The peak memory of one class of ranks, in bytes.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Memory {
    /// The class of ranks.
    pub class: RankClass,
    /// Parameters, gradients and optimizer states.
    pub states: States,
    /// Activations that blocks save for the backward pass, of all micro-batches in flight.
    pub activations: f64,
    /// Recomputed activations of the one block that runs its backward pass.
    pub recomputed: f64,
    /// Activations of the embedding.
    pub embedding: f64,
    /// Logits, their gradient and the loss.
    pub logits: f64,
    /// Communication buffers: gradient buckets, and sends and receives between stages.
    pub buffers: f64,
    /// Driver context, library workspaces and allocator fragmentation.
    pub overhead: f64,
}

impl Memory {
    /// The sum of all terms.
    pub const fn total(&self) -> f64 {
        self.states.on_device()
            + self.activations
            + self.recomputed
            + self.embedding
            + self.logits
            + self.buffers
            + self.overhead
    }
}

/// Memory that no tensor accounts for.
#[derive(Clone, Debug, PartialEq)]
pub struct Overheads {
    /// Bytes of the driver's context, library workspaces and communicators.
    pub context: SourcedValue,
    /// Allocator fragmentation as a fraction of tensor bytes.
    pub fragmentation: SourcedValue,
}

impl Overheads {
    /// No overhead, to compare tensor bytes only.
    pub fn none() -> Overheads {
        let nothing = || SourcedValue::assumed(0.0, "only tensors are counted");
        Overheads {
            context: nothing(),
            fragmentation: nothing(),
        }
    }

    /// The overhead of Megatron-DeepSpeed in 2022: what the driver reported, compared with its tensors. It includes
    /// allocator caches and buckets of half a billion elements.
    pub fn deepspeed_2022() -> Overheads {
        Overheads {
            fragmentation: SourcedValue::measured(
                0.29,
                "BLOOM's 16-bit trial runs with full recomputation, bigscience \
                 tr11-176B-ml/chronicles-prequel.md",
            ),
            ..Overheads::default()
        }
    }
}

impl Default for Overheads {
    fn default() -> Overheads {
        Overheads {
            context: SourcedValue::assumed(
                2.0 * GIB,
                "a CUDA context, workspaces and a few communicators take one to three GiB",
            ),
            fragmentation: SourcedValue::assumed(0.05, "the margin of Megatron's memory estimate"),
        }
    }
}

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// Size of a gradient bucket, as in PyTorch's DDP; two are in flight at once.
const BUCKET_BYTES: f64 = 25.0 * 1024.0 * 1024.0;

/// The peak memory of every class of ranks.
pub fn memory(
    shape: &DecoderConfig,
    strategy: &Strategy,
    software: &Software,
    overheads: &Overheads,
) -> Vec<Memory> {
    let layers_by_class = strategy.layers_by_class(shape);
    let each = layers_by_class.iter();
    each.map(|rank_layers| of_rank(shape, strategy, software, overheads, rank_layers))
        .collect()
}

/// The class of ranks with the highest peak memory.
pub fn peak(memories: &[Memory]) -> Option<&Memory> {
    let by_total = |a: &&Memory, b: &&Memory| a.total().total_cmp(&b.total());
    memories.iter().max_by(by_total)
}

fn of_rank(
    shape: &DecoderConfig,
    strategy: &Strategy,
    software: &Software,
    overheads: &Overheads,
    rank_layers: &RankLayers,
) -> Memory {
    let states = States::of(shape, strategy, rank_layers);
    let dense = BlockActivations::of(shape, strategy, software, false);
    let sparse = BlockActivations::of(shape, strategy, software, true);
    let saved = rank_layers.num_dense as f64 * dense.saved(strategy.recompute)
        + rank_layers.num_sparse as f64 * sparse.saved(strategy.recompute);
    let in_flight_microbatches = in_flight_microbatches(strategy, rank_layers.rank);
    let recomputed = match rank_layers.num_sparse {
        0 => dense.recomputed(strategy.recompute),
        _ => sparse.recomputed(strategy.recompute),
    };
    let activations = saved * in_flight_microbatches;
    let (embedding, logits) = ends(
        shape,
        strategy,
        software,
        rank_layers,
        in_flight_microbatches,
    );
    let buffers = buffers(strategy, dense.input);
    let mut memory = Memory {
        class: rank_layers.class,
        states,
        activations,
        recomputed,
        embedding,
        logits,
        buffers,
        overhead: 0.0,
    };
    let fragmentation = overheads.fragmentation.value * memory.total();
    memory.overhead = overheads.context.value + fragmentation;
    memory
}

/// The number of micro-batches in flight, in units of all of a rank's blocks.
fn in_flight_microbatches(strategy: &Strategy, rank: usize) -> f64 {
    let pipeline = &strategy.pipeline;
    let chunks = pipeline.stages_per_rank;
    let count = in_flight(
        pipeline.schedule,
        strategy.degrees.pp,
        strategy.num_microbatches(),
        chunks,
        rank,
    );
    match strategy.degrees.pp {
        1 => 1.0,
        _ => count as f64 / chunks as f64,
    }
}

/// Activations of the embedding and of the head. Logits exist in the compute type, in fp32, and as a gradient; the
/// loss is computed for one micro-batch at a time, or for a chunk of it: then the gradients of the hidden states and of the
/// weight exist from forward to backward.
fn ends(
    shape: &DecoderConfig,
    strategy: &Strategy,
    software: &Software,
    rank_layers: &RankLayers,
    in_flight_microbatches: f64,
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
    let embedding = if rank_layers.has_embedding {
        in_flight_microbatches * tokens * (8.0 + mask)
    } else {
        0.0
    };
    let logits = if rank_layers.has_head {
        let vocab = shape.vocab_size as f64 / tp;
        let chunks = software.num_loss_chunks as f64;
        let gradients = match software.num_loss_chunks {
            1 => 0.0,
            _ => hidden * (tokens * bytes + vocab * 4.0),
        };
        let logits = tokens / chunks * vocab * (bytes + 8.0);
        logits + gradients * in_flight_microbatches + tokens * 2.0 * hidden * bytes / between
    } else {
        0.0
    };
    (embedding, logits)
}

/// Gradient buckets, and the send and receive buffers of a pipeline.
fn buffers(strategy: &Strategy, activation_bytes: f64) -> f64 {
    let degrees = &strategy.degrees;
    let buckets = if degrees.data_parallel() * degrees.cp > 1 {
        2.0 * BUCKET_BYTES
    } else {
        0.0
    };
    let send_recv = if degrees.pp > 1 {
        4.0 * activation_bytes
    } else {
        0.0
    };
    buckets + send_recv
}
