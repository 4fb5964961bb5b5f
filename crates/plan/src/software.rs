//! Properties of the training program that affect time and memory.
//!
//! The same strategy takes other bytes and seconds with materialized attention than with flash attention. Such
//! properties are not choices of a plan; they depend on how a framework is implemented.

use std::fmt;

/// How the training program computes and communicates.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Software {
    /// The years whose kernels and host code the program has.
    pub generation: Generation,
    /// The attention kernel.
    pub attention: AttentionKernel,
    /// How element-wise operators are computed.
    pub operators: Operators,
    /// Whether sequence parallelism gathers the inputs of matrix products again in the backward pass, instead of
    /// keeping them unsharded.
    pub gathers_sequence_again: bool,
    /// Whether blocks apply dropout and save its masks.
    pub dropout: bool,
    /// Whether data-parallel and pipeline-parallel communication overlaps with compute.
    pub overlaps_data: bool,
    /// Whether tensor-parallel communication overlaps with compute.
    pub overlaps_tensor: bool,
    /// Bytes per gradient element in the reduction.
    pub gradient_on_wire: usize,
    /// Whether a pipeline reduces sharded gradients once per step instead of after every micro-batch, and holds them
    /// unsharded until then.
    pub reduces_once: bool,
    /// Chunks of a micro-batch's tokens whose logits exist one after the other; 1 if all exist at once.
    pub num_loss_chunks: usize,
}

/// Software of the same years is about as efficient.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub enum Generation {
    /// 2021: Megatron-LM of the first papers.
    Of2021,
    /// 2022 and 2023: more kernels are fused, and products of 16-bit numbers are faster.
    Of2023,
    /// Since 2024.
    Current,
}

/// The attention kernel.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub enum AttentionKernel {
    /// All scores are written to memory; the masked half is computed as well.
    Materialized,
    /// Flash attention: scores stay on chip, and masked tiles are skipped.
    Flash,
}

/// How element-wise operators are computed.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub enum Operators {
    /// One kernel per operator, as PyTorch without a compiler: each result that the backward pass needs is saved.
    Eager,
    /// Fused kernels: results inside of them are recomputed.
    Fused,
}

impl Software {
    /// Megatron-LM of 2021.
    pub const MEGATRON_2021: Software = Software {
        generation: Generation::Of2021,
        operators: Operators::Fused,
        gathers_sequence_again: true,
        reduces_once: false,
        attention: AttentionKernel::Materialized,
        dropout: true,
        overlaps_data: false,
        overlaps_tensor: false,
        gradient_on_wire: 2,
        num_loss_chunks: 1,
    };

    /// Megatron-LM of 2022 and 2023, without flash attention.
    pub const MEGATRON_2023: Software = Software {
        generation: Generation::Of2023,
        ..Software::MEGATRON_2021
    };

    /// Current frameworks, including Trainyard.
    pub const MODERN: Software = Software {
        generation: Generation::Current,
        operators: Operators::Eager,
        gathers_sequence_again: true,
        reduces_once: false,
        attention: AttentionKernel::Flash,
        dropout: false,
        overlaps_data: true,
        overlaps_tensor: false,
        gradient_on_wire: 4,
        num_loss_chunks: 1,
    };

    /// Current Megatron-Core with every overlap enabled.
    pub const MEGATRON_CORE: Software = Software {
        operators: Operators::Fused,
        gathers_sequence_again: true,
        overlaps_tensor: true,
        gradient_on_wire: 2,
        ..Software::MODERN
    };
}

/// Describes the program for reports.
impl fmt::Display for Software {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attention = match self.attention {
            AttentionKernel::Flash => "flash attention",
            AttentionKernel::Materialized => "materialized attention scores",
        };
        let dropout = if self.dropout { ", dropout" } else { "" };
        let overlap = |is: bool| {
            if is { "overlapped" } else { "exposed" }
        };
        let (data, tensor) = (overlap(self.overlaps_data), overlap(self.overlaps_tensor));
        let loss = match self.num_loss_chunks {
            1 => String::new(),
            chunks => format!("; the loss in {chunks} chunks"),
        };
        let bytes = self.gradient_on_wire;
        write!(
            f,
            "{attention}{dropout}; {bytes}-byte gradients, {data}; tensor-parallel communication {tensor}{loss}"
        )
    }
}
