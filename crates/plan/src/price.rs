//! What one given way to split costs, whatever a search would choose.

use crate::search::followed;
use crate::{Memory, Plan, Question, Strategy, StrategyError, Time, memory, peak};

impl Question {
    /// A strategy's bytes and seconds. It may need more memory than there is.
    pub fn price(&self, strategy: &Strategy) -> Result<Plan, StrategyError> {
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
            time: followed(self, &plan),
            ..plan
        })
    }

    /// The bytes of every class of ranks.
    pub fn memories(&self, strategy: &Strategy) -> Vec<Memory> {
        let software = &self.calibration.software;
        memory(&self.shape, strategy, software, &self.overheads)
    }

    /// Bytes that a plan lacks; negative where it has some to spare.
    pub fn missing(&self, plan: &Plan) -> f64 {
        plan.memory.total() - self.cluster.accelerator.memory.value
    }
}
