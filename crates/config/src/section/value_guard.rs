//! `[value_guard]`: what happens when the loss or the gradients of a step are not usable.

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::{at_least_one, within};
use crate::ConfigError;

/// What a job does about a step with unusable values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GuardPolicy {
    /// The job ends with an error that names the step, its samples and the ranks.
    #[default]
    Stop,
    /// The job goes on without the update of that step.
    Skip,
    /// The job goes back to the newest checkpoint and leaves out the samples of that step.
    Rollback,
}

/// `[value_guard]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct ValueGuardSection {
    /// Whether steps are watched for values that are not finite. Such a step never changes a parameter.
    pub enable: bool,
    /// What happens after such a step, and after a loss spike.
    pub policy: GuardPolicy,
    /// How many steps may be skipped or rolled back before the job ends.
    pub max_incidents: u64,
    /// Whether the samples of a step with values that are not finite are computed again, by the same ranks and by
    /// others, to tell a fault of a device from one in the data.
    pub rerun: bool,
    /// Steps between two comparisons of replicas; 0 for none. They are compared before every save to storage too.
    pub digest_interval: u64,
    /// The robust z-score above which the loss of a reported step is a spike; 0 turns this off.
    pub spike_threshold: f64,
    /// The number of reported steps that a loss is compared with.
    pub spike_window: u64,
}

impl Default for ValueGuardSection {
    fn default() -> Self {
        ValueGuardSection {
            enable: true,
            policy: GuardPolicy::Stop,
            max_incidents: 10,
            rerun: false,
            digest_interval: 100,
            spike_threshold: 0.0,
            spike_window: 100,
        }
    }
}

impl ValueGuardSection {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        within(
            "value_guard.spike_threshold",
            self.spike_threshold,
            0.0,
            1e6,
        )?;
        at_least_one("value_guard.spike_window", self.spike_window)
    }
}
