//! The time of outer steps: what replicas that are not joined in every step send to each other.

use crate::time::{StepModel, exposed};
use crate::{LocalUpdates, Synchronization};

impl StepModel<'_> {
    /// Seconds per step that replicas spend on outer steps or on parameter servers, exposed and overlapped, if the rest of a
    /// step takes `step` seconds.
    pub(crate) fn outer(&self, step: f64) -> (f64, f64) {
        if self.strategy.degrees.dp_outer == 1 {
            return (0.0, 0.0);
        }
        match &self.strategy.synchronization {
            Synchronization::EveryStep(_) => (0.0, 0.0),
            Synchronization::LocalUpdates(local) => self.outer_step(local, step),
            Synchronization::ParameterServer { staleness } => self.servers(*staleness, step),
        }
    }

    /// An outer step of every fragment, divided by the steps between two.
    fn outer_step(&self, local: &LocalUpdates, step: f64) -> (f64, f64) {
        let num_fragments = local.num_fragments.max(1) as f64;
        let elements = self.local().held(self.strategy) as f64 / num_fragments;
        let wire = local.wire(self.shape);
        let sent = self.network.reduce(self.outer_group(), elements, wire);
        let exposed = exposed(sent, local.overlapped_steps() * step);
        // The outer optimizer reads and writes what it keeps, and the parameters.
        let precision = self.strategy.precision.parameter as f64;
        let kept = local.state_bytes(elements.ceil() as u64) as f64;
        let update = self
            .compute_model
            .stream(2.0 * kept + 2.0 * precision * elements);
        let per_step = num_fragments / local.sync_steps.max(1) as f64;
        ((exposed + update) * per_step, (sent - exposed) * per_step)
    }

    /// Every worker sends its gradients to the servers and receives the parameters in every step. It may compute the next
    /// gradients in the meantime if it may be ahead.
    fn servers(&self, staleness: u64, step: f64) -> (f64, f64) {
        let elements = self.local().held(self.strategy) as f64;
        let width = self.calibration.software.gradient_on_wire as f64;
        let sent = 2.0
            * self
                .network
                .send_across(self.outer_group(), width * elements);
        let exposed = match staleness {
            0 => sent,
            _ => exposed(sent, step),
        };
        (exposed, sent - exposed)
    }
}
