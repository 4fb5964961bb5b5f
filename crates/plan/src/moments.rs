//! The moments of a step at which memory may peak, and what exists at each of them.
//!
//! Terms that never exist at the same time must not be added: logits are gone when the backward pass of the blocks
//! starts, and gradients of one micro-batch appear while its activations disappear.

use crate::activations::tokens;
use crate::in_flight::held;
use crate::{
    BlockActivations, LocalParameters, Memory, Operators, Overhead, RankLayers, Software, States,
    Strategy,
};
use trainyard_arch::{BlockKind, DecoderConfig};
use trainyard_schedule::StageHeld;

/// When the memory of a rank peaks.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub enum Moment {
    /// The loss of a micro-batch, with its logits.
    Loss,
    /// The backward pass of the output head.
    HeadBackward,
    /// The backward pass of one of the last blocks, while all others still hold their activations.
    BlockBackward,
    /// The end of the backward pass, with the gradients of all parameters.
    EndOfBackward,
}

impl Moment {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Moment::Loss => "loss",
            Moment::HeadBackward => "backward of the head",
            Moment::BlockBackward => "backward of a block",
            Moment::EndOfBackward => "end of backward",
        }
    }
}

/// The memory of a class of ranks at the moment of its peak, without overhead.
pub(crate) fn at_peak(
    shape: &DecoderConfig,
    strategy: &Strategy,
    software: &Software,
    rank_layers: &RankLayers,
) -> Memory {
    let rank = Rank::of(shape, strategy, software, rank_layers);
    let mut moments = vec![rank.block_backward(), rank.end_of_backward()];
    if rank_layers.has_head {
        moments.extend([rank.loss(), rank.head_backward()]);
    }
    let larger = |a: Memory, b: Memory| if b.tensors() > a.tensors() { b } else { a };
    let first = moments.remove(0);
    moments.into_iter().fold(first, larger)
}

/// What a rank of a class holds.
struct Rank<'a> {
    shape: &'a DecoderConfig,
    strategy: &'a Strategy,
    software: &'a Software,
    layers: &'a RankLayers,
    /// The states that exist between steps.
    states: States,
    /// The activations of the largest block, for one micro-batch.
    block: BlockActivations,
    /// Activations of all micro-batches in flight.
    activations: f64,
    /// What the embedding saves for them.
    embedding: f64,
    /// Parameters of the largest block and of the head.
    block_parameters: f64,
    head_parameters: f64,
}

impl<'a> Rank<'a> {
    fn of(
        shape: &'a DecoderConfig,
        strategy: &'a Strategy,
        software: &'a Software,
        layers: &'a RankLayers,
    ) -> Rank<'a> {
        let of_kind = |kind| BlockActivations::of(shape, strategy, software, kind);
        let (dense, sparse) = (of_kind(BlockKind::Dense), of_kind(BlockKind::Experts));
        let (kind, block) = match layers.num_sparse {
            0 => (BlockKind::Dense, dense),
            _ => (BlockKind::Experts, sparse),
        };
        let recompute = strategy.recompute;
        let head = LocalParameters::of_head(shape, strategy).total();
        let of_stage = |stage| {
            let (num_dense, num_sparse) = strategy.layers_of_stage(shape, stage);
            let sum =
                |of_dense, of_sparse| num_dense as f64 * of_dense + num_sparse as f64 * of_sparse;
            let is_last = stage + 1 == strategy.num_stages();
            let logits = if is_last {
                head_gradient(shape, strategy, head)
            } else {
                0.0
            };
            StageHeld {
                activations: sum(dense.saved(recompute), sparse.saved(recompute)),
                weight_gradients: sum(dense.deferred(), sparse.deferred()) + logits,
            }
        };
        let of_embedding = |stage| StageHeld {
            activations: match stage {
                0 => embedding(shape, strategy, software),
                _ => 0.0,
            },
            weight_gradients: 0.0,
        };
        Rank {
            shape,
            strategy,
            software,
            layers,
            states: States::of(shape, strategy, layers),
            block,
            activations: held(strategy, layers.rank, of_stage),
            embedding: if layers.has_embedding {
                held(strategy, layers.rank, of_embedding)
            } else {
                0.0
            },
            block_parameters: LocalParameters::of_block(shape, strategy, kind).total(),
            head_parameters: head,
        }
    }

    /// What exists at any moment while all micro-batches are in flight.
    fn at(&self, moment: Moment) -> Memory {
        Memory {
            class: self.layers.class,
            moment,
            states: self.states,
            activations: self.activations,
            backward: 0.0,
            embedding: self.embedding,
            logits: 0.0,
            buffers: match self.strategy.degrees.pp {
                1 => 0.0,
                _ => 2.0 * self.block.input,
            },
            overhead: Overhead::default(),
        }
    }

    /// Gradients of one micro-batch do not exist before its backward pass, unless they are views of buckets.
    fn without_new_gradients(&self, mut memory: Memory) -> Memory {
        let degrees = &self.strategy.degrees;
        let has_buckets = degrees.data_parallel() * degrees.cp > 1;
        if !has_buckets && self.strategy.num_microbatches() == 1 {
            memory.states.gradients = 0.0;
        }
        memory
    }

    /// Logits exist in the compute type, in fp32, and as gradients, for one micro-batch at a time or for a chunk of it.
    fn loss(&self) -> Memory {
        let (tokens, vocab) = (tokens(self.strategy), self.vocab());
        let mut memory = self.without_new_gradients(self.at(Moment::Loss));
        let chunks = self.software.num_loss_chunks as f64;
        let logits = tokens / chunks * vocab * self.software.bytes_per_logit(self.strategy);
        let cast = self.head_parameters * self.cast_bytes();
        memory.logits = logits + cast + self.chunk_gradients() + self.head_input();
        memory.states.gathered = self.gathered(self.head_parameters + self.block_parameters);
        memory
    }

    /// The gradient of the logits becomes those of the hidden states and of the head's weight.
    fn head_backward(&self) -> Memory {
        let compute = self.strategy.precision.compute as f64;
        let (tokens, vocab) = (tokens(self.strategy), self.vocab());
        let mut memory = self.without_new_gradients(self.at(Moment::HeadBackward));
        let chunks = self.software.num_loss_chunks as f64;
        let hidden = tokens * self.shape.hidden_size as f64 * compute;
        let weight = self.head_parameters * (compute + 2.0 * self.cast_bytes());
        memory.logits = tokens / chunks * vocab * compute + hidden + weight + self.head_input();
        memory.buffers += self.reduced(&[self.head_parameters]);
        memory.states.gathered = self.gathered(self.head_parameters + self.block_parameters);
        memory
    }

    /// The backward pass of the last block, while the head's gradients are reduced, or of the block before.
    fn block_backward(&self) -> Memory {
        let mut last = self.without_new_gradients(self.at(Moment::BlockBackward));
        last.backward = self.block.backward(self.strategy.recompute);
        last.states.gathered = self.gathered(2.0 * self.block_parameters);
        let mut before = last;
        last.buffers += self.unreduced();
        before.buffers += self.unreduced();
        last.buffers += self.reduced(&[self.of_head(), self.block_parameters]);
        if self.layers.num_blocks() > 1 {
            before.activations -= self.block.saved(self.strategy.recompute);
            before.buffers += self.reduced(&[self.block_parameters; 2]);
        }
        if before.tensors() > last.tensors() {
            before
        } else {
            last
        }
    }

    /// The end of the last micro-batch: all gradients exist, those of the largest unit once more if the reduction needs
    /// another type, and activations of one block.
    fn end_of_backward(&self) -> Memory {
        let mut memory = self.at(Moment::EndOfBackward);
        memory.activations = self.block.saved(self.strategy.recompute);
        memory.backward = self.block.backward(self.strategy.recompute);
        memory.states.gathered = self.gathered(self.block_parameters);
        memory.buffers += match self.strategy.zero_stage {
            1 => self.cast_for_reduction(self.of_head().max(self.block_parameters)),
            _ => self.reduced(&[self.block_parameters; 2]),
        };
        memory
    }

    /// The parameters of the head, if this rank has it.
    fn of_head(&self) -> f64 {
        if self.layers.has_head {
            self.head_parameters
        } else {
            0.0
        }
    }

    fn vocab(&self) -> f64 {
        self.shape.vocab_size as f64 / self.strategy.degrees.tp as f64
    }

    /// The input of the final norm and that of the head.
    fn head_input(&self) -> f64 {
        let hidden = self.shape.hidden_size as f64 * self.strategy.precision.compute as f64;
        let norm = hidden / self.strategy.shards_between_products();
        let head = hidden / self.strategy.shards_of_inputs(self.software);
        tokens(self.strategy) * (norm + head)
    }

    /// If the loss is computed in chunks, forward leaves the gradients of the hidden states and of the head's weight.
    fn chunk_gradients(&self) -> f64 {
        if self.software.num_loss_chunks == 1 {
            return 0.0;
        }
        let hidden = self.shape.hidden_size as f64 * tokens(self.strategy);
        hidden * self.strategy.precision.compute as f64 + 4.0 * self.head_parameters
    }

    /// Bytes per element of a weight's copy in the compute type, if there is one.
    fn cast_bytes(&self) -> f64 {
        self.strategy.precision.cast() as f64
    }

    /// Bytes of so many parameters that stage 3, or offload, gathers for use.
    fn gathered(&self, parameters: f64) -> f64 {
        if self.strategy.gathers_parameters() {
            parameters * self.strategy.precision.compute as f64
        } else {
            0.0
        }
    }

    /// Bytes of the gradients of consecutive units, each with so many parameters, which exist unsharded until they are
    /// reduced. Stage 1 keeps all gradients unsharded; it reduces those of the last micro-batch.
    fn reduced(&self, units: &[f64]) -> f64 {
        let width = self.strategy.precision.reduced as f64;
        match self.strategy.zero_stage {
            0 => 0.0,
            1 if self.strategy.num_microbatches() > 1 => 0.0,
            _ if self.reduces_once() => 0.0,
            1 => units
                .iter()
                .copied()
                .map(|unit| self.cast_for_reduction(unit))
                .fold(0.0, f64::max),
            _ => units.iter().sum::<f64>() * width,
        }
    }

    fn reduces_once(&self) -> bool {
        let is_pipeline = self.strategy.degrees.pp > 1 && self.strategy.num_microbatches() > 1;
        self.software.reduces_once && is_pipeline && self.strategy.zero_stage > 1
    }

    /// Bytes of sharded gradients that are held unsharded until the end of the step, when the first micro-batches have
    /// gone through the backward pass of so many of the rank's stages.
    fn unreduced(&self) -> f64 {
        if !self.reduces_once() {
            return 0.0;
        }
        let (pp, chunks) = (
            self.strategy.degrees.pp,
            self.strategy.pipeline.stages_per_rank,
        );
        let beyond = self.strategy.num_microbatches().saturating_sub(pp) as f64 / pp as f64;
        let share = beyond.max(1.0 / chunks as f64).min(1.0);
        let parameters = LocalParameters::of(self.shape, self.strategy, self.layers).total();
        share * parameters * self.strategy.precision.reduced as f64
    }

    /// Bytes of a copy of gradients in the type of the reduction, if that is another.
    fn cast_for_reduction(&self, parameters: f64) -> f64 {
        let precision = &self.strategy.precision;
        if precision.reduced == precision.gradient {
            0.0
        } else {
            parameters * precision.reduced as f64
        }
    }
}

/// What the embedding saves for a micro-batch: token ids, and a mask of dropout.
fn embedding(shape: &DecoderConfig, strategy: &Strategy, software: &Software) -> f64 {
    let mask = if software.dropout {
        shape.hidden_size as f64 / strategy.shards_between_products()
    } else {
        0.0
    };
    tokens(strategy) * (8.0 + mask)
}

/// What the head holds of a micro-batch until its weight gradient is computed.
fn head_gradient(shape: &DecoderConfig, strategy: &Strategy, parameters: f64) -> f64 {
    let compute = strategy.precision.compute as f64;
    let width = parameters / shape.hidden_size as f64 + shape.hidden_size as f64;
    tokens(strategy) * width * compute + parameters * strategy.precision.cast() as f64
}

impl Software {
    /// Bytes that exist per logit at the peak of the loss.
    fn bytes_per_logit(&self, strategy: &Strategy) -> f64 {
        match self.operators {
            // The logarithm of the softmax and two gradients, in fp32.
            Operators::Eager => 12.0,
            Operators::Fused => strategy.precision.compute as f64 + 8.0,
        }
    }
}
