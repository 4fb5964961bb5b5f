//! What a plan predicts, to be shown beside what is measured.

use serde::{Deserialize, Serialize};

/// The prediction of a plan for one step.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Prediction {
    /// The likely time of a step.
    step_seconds: f64,
    /// Between these times a step is expected.
    step_seconds_range: [f64; 2],
    /// The peak memory of the rank with the most.
    peak_bytes: f64,
    /// Model FLOPs utilization, from 0 to 1.
    #[serde(default)]
    mfu: Option<f64>,
    /// The tokens per second of one rank.
    #[serde(default)]
    tokens_per_second_per_gpu: Option<f64>,
}

/// The output of `trainyard plan --json`, as far as it is needed.
#[derive(Deserialize)]
struct PlanFile {
    plans: Vec<Prediction>,
}

impl Prediction {
    /// Reads the best plan of a file; `None` if it has no plan.
    pub fn read(text: &str) -> serde_json::Result<Option<Prediction>> {
        let PlanFile { plans } = serde_json::from_str(text)?;
        Ok(plans.into_iter().next())
    }
}
