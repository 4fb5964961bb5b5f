//! Blocks that attend to the nearest positions only.

use serde::{Deserialize, Serialize};

/// Attention to a window of positions, in some blocks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlidingWindow {
    /// The number of positions that a query attends to, its own included.
    pub sliding_window: usize,
    /// Every block whose number is a multiple of this, counted from 1, attends to all positions; none does if absent.
    pub full_attention_every: Option<usize>,
    /// Base of the rotary frequencies in blocks with a window, whose frequencies are not scaled.
    pub rope_local_base_freq: Option<f64>,
}

impl SlidingWindow {
    /// Whether block `index`, counted from 0, attends to a window only.
    pub fn applies_to(&self, index: usize) -> bool {
        let is_full = |every: usize| (index + 1).is_multiple_of(every);
        !self.full_attention_every.is_some_and(is_full)
    }
}
