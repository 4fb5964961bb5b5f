//! What was measured, in the terms of what is predicted: costs of stages, and the schedule that ran.

use std::collections::HashMap;

use crate::simulate::StageCost;
use crate::{Action, Costs, Schedule, ScheduleError, Task, Timeline, Work};

impl Costs {
    /// What the stages of measured steps took: the median of each kind of work over all micro-batches
    /// and steps.
    pub fn measured(steps: &[Timeline]) -> Costs {
        let spans = || steps.iter().flat_map(|step| step.ranks.iter().flatten());
        let mut alone: HashMap<(usize, Work), Vec<f64>> = HashMap::new();
        for span in spans() {
            if let Action::One(Task { stage, work, .. }) = span.action {
                let lengths = alone.entry((stage, work)).or_default();
                lengths.push(span.end - span.start);
            }
        }
        let num_stages = alone.keys().map(|(stage, _)| stage + 1).max();
        let mut cost = |stage, work| median(alone.entry((stage, work)).or_default());
        let stages = (0..num_stages.unwrap_or(0)).map(|stage| {
            let [input, weight] =
                [Work::BackwardInput, Work::BackwardWeight].map(|work| cost(stage, work));
            StageCost {
                forward: cost(stage, Work::Forward).unwrap_or(0.0),
                backward: cost(stage, Work::Backward)
                    .unwrap_or(input.unwrap_or(0.0) + weight.unwrap_or(0.0)),
                backward_input: input.unwrap_or(0.0),
                backward_weight: weight.unwrap_or(0.0),
            }
        });
        let mut costs = Costs::new(stages.collect());
        let mut over_alone: Vec<f64> = spans()
            .filter_map(|span| match span.action {
                Action::One(_) => None,
                Action::Both(first, second) => {
                    Some((span.end - span.start) / (costs.of(first) + costs.of(second)))
                }
            })
            .filter(|ratio| ratio.is_finite())
            .collect();
        costs.overlap = median(&mut over_alone).unwrap_or(1.0);
        costs
    }
}

impl Timeline {
    /// The schedule that was followed.
    pub fn schedule(&self) -> Result<Schedule, ScheduleError> {
        let actions = |spans: &Vec<crate::Span>| spans.iter().map(|span| span.action).collect();
        Schedule::of_actions(self.ranks.iter().map(actions).collect())
    }
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use crate::{Costs, Kind, simulate};

    #[test]
    fn what_was_predicted_is_read_back() -> Result<(), crate::ScheduleError> {
        let costs = Costs::of_stages(&[(1.0, 2.0, 3.0), (2.0, 1.0, 1.0), (1.0, 1.0, 1.0)]);
        for kind in [Kind::GPipe, Kind::ZeroBubbleH1] {
            let schedule = kind.build(3, 5, 1)?;
            let timeline = simulate(&schedule, &costs)?;
            assert_eq!(timeline.schedule()?, schedule);
            let measured = Costs::measured(&[timeline.clone(), timeline.clone()]);
            assert_eq!(simulate(&schedule, &measured)?, timeline);
        }
        Ok(())
    }
}
