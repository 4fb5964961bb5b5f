//! The components of a step's time, as finely as a trace can separate them.
//!
//! A prediction has more terms than a trace. Kernels that wait for their launch look like kernels that compute, and
//! a stage that waits for a message cannot separate the transfer from the work that produces it.

use trainyard_mesh::{Axis, AxisSet};
use trainyard_trace::{Collective, Purpose};

use trainyard_plan::Time;

/// A component of a step's time.
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum TimeComponent {
    /// Forward and backward compute.
    Compute,
    /// Exposed tensor-parallel communication.
    Tensor,
    /// Exposed context-parallel communication.
    Context,
    /// Exposed expert-parallel communication.
    Expert,
    /// Pipeline bubble and pipeline-parallel communication.
    Pipeline,
    /// Exposed data-parallel communication.
    Data,
    /// The optimizer step.
    Optimizer,
    /// Transfers of offloaded states.
    Offload,
    /// Control collectives: norms, counts and barriers. Predictions assume that they are free.
    Control,
    /// Waiting for the data loader. Predictions assume that it is free.
    DataLoading,
    /// Everything else.
    Other,
}

impl TimeComponent {
    /// All components, in the order reports show them.
    pub const ALL: [TimeComponent; 11] = [
        TimeComponent::Compute,
        TimeComponent::Tensor,
        TimeComponent::Context,
        TimeComponent::Expert,
        TimeComponent::Pipeline,
        TimeComponent::Data,
        TimeComponent::Optimizer,
        TimeComponent::Offload,
        TimeComponent::Control,
        TimeComponent::DataLoading,
        TimeComponent::Other,
    ];

    /// The name in reports.
    pub const fn description(self) -> &'static str {
        match self {
            TimeComponent::Compute => "compute, recomputation and kernel launch",
            TimeComponent::Tensor => "tensor-parallel communication (tp)",
            TimeComponent::Context => "context-parallel communication (cp)",
            TimeComponent::Expert => "expert-parallel communication (ep)",
            TimeComponent::Pipeline => "pipeline bubble and communication (pp)",
            TimeComponent::Data => "data-parallel communication (dp)",
            TimeComponent::Optimizer => "optimizer step",
            TimeComponent::Offload => "offload transfers",
            TimeComponent::Control => "control collectives",
            TimeComponent::DataLoading => "waiting for data",
            TimeComponent::Other => "other",
        }
    }

    /// The sum of the predicted terms that this component covers.
    pub fn predicted(self, time: &Time) -> f64 {
        match self {
            TimeComponent::Compute => time.compute + time.recomputation + time.launch,
            TimeComponent::Tensor => time.tensor,
            TimeComponent::Context => time.context,
            TimeComponent::Expert => time.expert,
            TimeComponent::Pipeline => time.pipeline + time.bubble,
            TimeComponent::Data => time.data,
            TimeComponent::Optimizer => time.optimizer,
            TimeComponent::Offload => time.offload,
            TimeComponent::Control | TimeComponent::DataLoading | TimeComponent::Other => 0.0,
        }
    }

    /// Whether traces contain this component. Offload transfers happen inside the optimizer step and are not
    /// traced.
    pub const fn is_traced(self) -> bool {
        !matches!(self, TimeComponent::Offload)
    }

    /// The component that a wait for a collective belongs to. A stage that has finished waits for the others at the
    /// next control collective, so with a pipeline that wait counts as pipeline time.
    pub(super) fn of_wait(collective: &Collective, has_stages: bool) -> TimeComponent {
        let axes: AxisSet = collective.group.parse().unwrap_or(AxisSet::EMPTY);
        let is_between_stages = has_stages && axes.contains(Axis::Pp);
        match collective.purpose {
            Purpose::Dispatch | Purpose::Combine => TimeComponent::Expert,
            Purpose::Gradient | Purpose::OuterGradient | Purpose::Parameter | Purpose::State => {
                TimeComponent::Data
            }
            Purpose::Activation | Purpose::Control if is_between_stages => TimeComponent::Pipeline,
            Purpose::Activation if axes.contains(Axis::Cp) => TimeComponent::Context,
            Purpose::Activation => TimeComponent::Tensor,
            Purpose::Control | Purpose::Unknown => TimeComponent::Control,
        }
    }
}
