//! Where a step's seconds go, as finely as a run can tell.
//!
//! A prediction knows more terms than a trace: kernels that wait for their launch look like kernels that
//! compute, and a stage that waits for a message cannot tell the message from the work it is the result of.

use trainyard_mesh::{Axis, AxisSet};
use trainyard_trace::{Collective, Purpose};

use crate::Time;

/// Part of a step's seconds.
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Part {
    /// Forward and backward.
    Computing,
    /// Waiting for messages of shared matrices.
    Tensor,
    /// Waiting for keys and values of other positions.
    Context,
    /// Waiting for routed tokens.
    Expert,
    /// Waiting for other stages.
    Stages,
    /// Waiting for gradients and sharded parameters.
    Data,
    /// The optimiser's step.
    Optimizer,
    /// Moving states to and from main memory.
    Offload,
    /// Waiting for norms, counts and barriers, which a prediction takes to be free.
    Agreeing,
    /// Waiting for samples, which a prediction takes to be free.
    Samples,
    /// All else.
    Besides,
}

impl Part {
    /// Every part, in the order they are shown.
    pub const ALL: [Part; 11] = [
        Part::Computing,
        Part::Tensor,
        Part::Context,
        Part::Expert,
        Part::Stages,
        Part::Data,
        Part::Optimizer,
        Part::Offload,
        Part::Agreeing,
        Part::Samples,
        Part::Besides,
    ];

    /// What it is, in words.
    pub const fn words(self) -> &'static str {
        match self {
            Part::Computing => "computing, recomputing and launching",
            Part::Tensor => "messages of shared matrices (tp)",
            Part::Context => "keys and values of other positions (cp)",
            Part::Expert => "routed tokens (ep)",
            Part::Stages => "other stages and their messages (pp)",
            Part::Data => "gradients and sharded parameters (dp)",
            Part::Optimizer => "the optimiser's step",
            Part::Offload => "moving states to and from main memory",
            Part::Agreeing => "norms, counts and barriers",
            Part::Samples => "waiting for samples",
            Part::Besides => "all else",
        }
    }

    /// The terms of a prediction that it is made of.
    pub fn predicted(self, time: &Time) -> f64 {
        match self {
            Part::Computing => time.compute + time.recomputation + time.launch,
            Part::Tensor => time.tensor,
            Part::Context => time.context,
            Part::Expert => time.expert,
            Part::Stages => time.pipeline + time.bubble,
            Part::Data => time.data,
            Part::Optimizer => time.optimizer,
            Part::Offload => time.offload,
            Part::Agreeing | Part::Samples | Part::Besides => 0.0,
        }
    }

    /// Whether a trace tells it. States are moved inside of the optimiser's step, unseen.
    pub const fn is_traced(self) -> bool {
        !matches!(self, Part::Offload)
    }

    /// What waiting for a collective is part of, in a run with stages or without. A stage that is done waits
    /// for the others where all agree next, so there agreeing is theirs.
    pub(super) fn of_wait(collective: &Collective, has_stages: bool) -> Part {
        let axes: AxisSet = collective.group.parse().unwrap_or(AxisSet::EMPTY);
        let is_between_stages = has_stages && axes.contains(Axis::Pp);
        match collective.purpose {
            Purpose::Dispatch | Purpose::Combine => Part::Expert,
            Purpose::Gradient | Purpose::Parameter | Purpose::State => Part::Data,
            Purpose::Activation | Purpose::Control if is_between_stages => Part::Stages,
            Purpose::Activation if axes.contains(Axis::Cp) => Part::Context,
            Purpose::Activation => Part::Tensor,
            Purpose::Control => Part::Agreeing,
        }
    }
}
