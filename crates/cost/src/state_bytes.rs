//! Bytes of parameters, gradients and optimizer states on a rank.

use std::iter::Sum;

use serde::Serialize;

use crate::Stage;

/// Bytes that one rank holds between steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct StateBytes {
    /// Parameters in the type of computation.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Master weights, if they are not the parameters themselves, and the optimizer's moments.
    pub optimizer: u64,
}

/// Elements of states that are sharded over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardedElements {
    /// All, with padding.
    pub full: u64,
    /// Those of one rank.
    pub shard: u64,
}

/// Bytes per element of each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateWidths {
    /// Of parameters.
    pub parameter: u64,
    /// Of gradients as backward computes them.
    pub gradient: u64,
    /// Of reduced gradients.
    pub reduced: u64,
    /// Of the optimizer's states, master weights included if they are not the parameters themselves.
    pub optimizer: u64,
}

impl StateBytes {
    /// The states of a rank with this ZeRO stage; without one, every rank has all.
    pub fn of(stage: Option<Stage>, elements: ShardedElements, widths: StateWidths) -> StateBytes {
        let ShardedElements { full, shard } = elements;
        let full_gradients = full * widths.gradient;
        let (parameters, gradients, optimizer) = match stage {
            None => (full, full_gradients, full),
            // The reduced shard is a view of the full gradient unless its type differs.
            Some(Stage::OptimizerStates) if widths.reduced == widths.gradient => {
                (full, full_gradients, shard)
            }
            Some(Stage::OptimizerStates) => (full, full_gradients + shard * widths.reduced, shard),
            Some(Stage::Gradients) => (full, shard * widths.reduced, shard),
            Some(Stage::Parameters) => (shard, shard * widths.reduced, shard),
        };
        StateBytes {
            parameters: parameters * widths.parameter,
            gradients,
            optimizer: optimizer * widths.optimizer,
        }
    }

    /// The sum of all states.
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer
    }
}

impl Sum for StateBytes {
    fn sum<I: Iterator<Item = StateBytes>>(states: I) -> StateBytes {
        states.fold(StateBytes::default(), |sum, state| StateBytes {
            parameters: sum.parameters + state.parameters,
            gradients: sum.gradients + state.gradients,
            optimizer: sum.optimizer + state.optimizer,
        })
    }
}
