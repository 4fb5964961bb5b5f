//! What the program that runs a strategy does, where programs differ.
//!
//! The same split takes other bytes and seconds with attention that writes its scores down than with
//! attention that does not. Such things are no choice of a plan; they are how a framework is written.

use std::fmt;

/// How the program computes and communicates.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Software {
    /// How attention is computed.
    pub attention: AttentionKernel,
    /// Whether blocks leave parts out at random while training, and keep which.
    pub dropout: bool,
    /// Whether gradients, sharded parameters and what goes from stage to stage travel while ranks compute.
    pub overlaps_data: bool,
    /// Whether the messages of tensor-parallel layers travel while they compute.
    pub overlaps_tensor: bool,
    /// Bytes of a gradient on the wire.
    pub gradient_on_wire: usize,
}

/// How attention is computed.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub enum AttentionKernel {
    /// Every score is written to memory; half of them are masked, but all are computed.
    Materialised,
    /// In tiles that never leave the chip; masked tiles are skipped.
    Flash,
}

impl Software {
    /// Megatron as it was in 2021.
    pub const MEGATRON_2021: Software = Software {
        attention: AttentionKernel::Materialised,
        dropout: true,
        overlaps_data: false,
        overlaps_tensor: false,
        gradient_on_wire: 2,
    };

    /// What frameworks do today, ours among them.
    pub const MODERN: Software = Software {
        attention: AttentionKernel::Flash,
        dropout: false,
        overlaps_data: true,
        overlaps_tensor: false,
        gradient_on_wire: 4,
    };

    /// Megatron today, with every overlap it has.
    pub const MEGATRON_CORE: Software = Software {
        overlaps_tensor: true,
        gradient_on_wire: 2,
        ..Software::MODERN
    };
}

/// In words, as a report says it.
impl fmt::Display for Software {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attention = match self.attention {
            AttentionKernel::Flash => "attention in tiles",
            AttentionKernel::Materialised => "attention that writes its scores down",
        };
        let dropout = if self.dropout { ", dropout" } else { "" };
        let beside = |is: bool| {
            if is {
                "beside computing"
            } else {
                "by themselves"
            }
        };
        let (data, tensor) = (beside(self.overlaps_data), beside(self.overlaps_tensor));
        let bytes = self.gradient_on_wire;
        write!(
            f,
            "{attention}{dropout}; gradients of {bytes} bytes travel {data}, messages of shared matrices {tensor}"
        )
    }
}
