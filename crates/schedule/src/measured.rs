//! Costs and schedules from measured timelines, for comparison with predictions.

use std::collections::HashMap;

use crate::simulate::StageCost;
use crate::{Action, ComputeType, Costs, Schedule, ScheduleError, Task, Timeline};

impl Costs {
    /// The costs of stages in measured steps: the median of each kind of computation over all micro-batches
    /// and steps.
    pub fn measured(steps: &[Timeline]) -> Costs {
        let spans = || steps.iter().flat_map(|step| step.ranks.iter().flatten());
        let mut alone: HashMap<(usize, ComputeType), Vec<f64>> = HashMap::new();
        for span in spans() {
            if let Action::Single(Task {
                stage,
                compute_type,
                ..
            }) = span.action
            {
                let lengths = alone.entry((stage, compute_type)).or_default();
                lengths.push(span.end - span.start);
            }
        }
        let num_stages = alone.keys().map(|(stage, _)| stage + 1).max();
        let mut cost =
            |stage, compute_type| median(alone.entry((stage, compute_type)).or_default());
        let stages = (0..num_stages.unwrap_or(0)).map(|stage| {
            let [input, weight] = [ComputeType::BackwardInput, ComputeType::BackwardWeight]
                .map(|compute_type| cost(stage, compute_type));
            StageCost {
                forward: cost(stage, ComputeType::Forward).unwrap_or(0.0),
                backward: cost(stage, ComputeType::Backward)
                    .unwrap_or(input.unwrap_or(0.0) + weight.unwrap_or(0.0)),
                backward_input: input.unwrap_or(0.0),
                backward_weight: weight.unwrap_or(0.0),
            }
        });
        let mut costs = Costs::new(stages.collect());
        let mut ratios: Vec<f64> = spans()
            .filter_map(|span| match span.action {
                Action::Single(_) => None,
                Action::Overlapped(first, second) => {
                    Some((span.end - span.start) / (costs.of(first) + costs.of(second)))
                }
            })
            .filter(|ratio| ratio.is_finite())
            .collect();
        costs.overlap = median(&mut ratios).unwrap_or(1.0);
        costs
    }
}

impl Timeline {
    /// The schedule that the timeline executed.
    pub fn schedule(&self) -> Result<Schedule, ScheduleError> {
        let actions = |spans: &Vec<crate::Span>| spans.iter().map(|span| span.action).collect();
        Schedule::from_actions(self.ranks.iter().map(actions).collect())
    }
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use crate::{Costs, ScheduleKind, simulate};

    #[test]
    fn measured_costs_of_a_prediction_reproduce_it() -> Result<(), crate::ScheduleError> {
        let costs = Costs::per_stage(&[(1.0, 2.0, 3.0), (2.0, 1.0, 1.0), (1.0, 1.0, 1.0)]);
        for kind in [ScheduleKind::GPipe, ScheduleKind::ZeroBubbleH1] {
            let schedule = kind.build(3, 5, 1)?;
            let timeline = simulate(&schedule, &costs)?;
            assert_eq!(timeline.schedule()?, schedule);
            let measured = Costs::measured(&[timeline.clone(), timeline.clone()]);
            assert_eq!(simulate(&schedule, &measured)?, timeline);
        }
        Ok(())
    }
}
