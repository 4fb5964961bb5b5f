//! The estimated time and memory of one given strategy.

use crate::search::simulated;
use crate::{Memory, Plan, PlanRequest, Strategy, StrategyError, Time, memory, peak};

impl PlanRequest {
    /// Estimates a strategy's memory and step time. The plan may need more memory than the accelerator has.
    ///
    /// # Errors
    /// The strategy is invalid for the model.
    pub fn estimate(&self, strategy: &Strategy) -> Result<Plan, StrategyError> {
        strategy.check(&self.shape)?;
        let all = self.memories(strategy);
        let Some(&memory) = peak(&all) else {
            return Err(StrategyError::Range {
                what: "ranks",
                value: 0,
                least: 1,
                most: self.cluster.world_size(),
            });
        };
        let plan = Plan {
            strategy: strategy.clone(),
            time: Time::default(),
            memory,
        };
        Ok(Plan {
            time: simulated(self, &plan),
            ..plan
        })
    }

    /// The memory of every class of ranks.
    pub fn memories(&self, strategy: &Strategy) -> Vec<Memory> {
        let software = &self.calibration.software;
        memory(&self.shape, strategy, software, &self.overheads)
    }

    /// The bytes by which a plan's peak memory exceeds the accelerator; negative if there is memory to spare.
    pub fn shortfall(&self, plan: &Plan) -> f64 {
        plan.memory.total() - self.cluster.accelerator.memory.value
    }
}
