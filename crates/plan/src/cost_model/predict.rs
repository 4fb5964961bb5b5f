//! Predicts the step time of a dry run.

use serde::{Deserialize, Serialize};
use trainyard_schedule::{Costs, Schedule, ScheduleError, simulate};
use trainyard_trace::{Calls, CollectiveKind, Purpose};

use super::{NodeProfile, ProfileError};

/// The parts of a rank's `trainyard dry-run --json` that take time.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct DryRun {
    /// Operators by name and size.
    pub operators: Vec<Calls>,
    /// Collectives by kind and purpose.
    pub collectives: Vec<CollectiveCalls>,
}

/// Collectives of one kind and purpose.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct CollectiveCalls {
    /// The collective.
    pub kind: CollectiveKind,
    /// What it communicates.
    pub purpose: Purpose,
    /// Number of calls.
    pub count: u64,
    /// Bytes that this rank sends in all calls.
    pub sent_bytes: u64,
}

/// The seconds of a rank's step by what they are spent on.
#[derive(Copy, Clone, Debug, Default, PartialEq, Serialize)]
pub struct StepBreakdown {
    /// Forward and backward operators.
    pub compute: f64,
    /// Optimizer operators.
    pub optimizer: f64,
    /// Host time between operators.
    pub host: f64,
    /// Communication. Without accelerators, ranks communicate on the cores they compute with, so all of it is
    /// exposed.
    pub communication: f64,
    /// Waiting for stragglers among ranks with equal work.
    pub straggler_wait: f64,
    /// The pipeline bubble.
    pub bubble: f64,
    /// The part of the above that is extrapolated, for operators that were not measured.
    pub extrapolated: f64,
}

impl StepBreakdown {
    /// The step time.
    pub const fn total(&self) -> f64 {
        self.busy() + self.bubble
    }

    const fn busy(&self) -> f64 {
        self.compute + self.optimizer + self.host + self.communication + self.straggler_wait
    }
}

/// Predicts a rank's step time without the pipeline bubble.
pub fn predict(profile: &NodeProfile, run: &DryRun) -> StepBreakdown {
    let mut step = StepBreakdown::default();
    for calls in &run.operators {
        let seconds = match profile.operators.get(&calls.name) {
            Some(cost) => cost.seconds(calls),
            None => {
                let seconds = calls.count as f64 * profile.default_cost.at(calls.elements as f64);
                step.extrapolated += seconds;
                seconds
            }
        };
        if is_of_optimizer(&calls.name) {
            step.optimizer += seconds
        } else {
            step.compute += seconds
        }
        step.host += calls.count as f64 * profile.host_gap;
    }
    let each = run.collectives.iter();
    step.communication = each.map(|calls| communication(profile, calls)).sum();
    // A sender does not wait for its receiver.
    let blocking = run.collectives.iter();
    let blocking = blocking.filter(|calls| calls.kind != CollectiveKind::Send);
    let num_sync_points = blocking.map(|calls| calls.count).sum();
    step.straggler_wait = profile
        .straggler_wait
        .at(num_sync_points, step.compute + step.host);
    step
}

/// Whether an operator belongs to the optimizer step, which also clips gradients.
pub(crate) fn is_of_optimizer(name: &str) -> bool {
    let marks = ["_fused_adam", "_fused_sgd", "_foreach_"];
    marks.iter().any(|mark| name.contains(mark))
}

/// Seconds of communication; a point-to-point transfer counts at its sender.
fn communication(profile: &NodeProfile, calls: &CollectiveCalls) -> f64 {
    let kind = match calls.kind {
        CollectiveKind::Send => "send_recv".to_owned(),
        CollectiveKind::Recv => return 0.0,
        kind => kind.to_string(),
    };
    let Some(cost) = profile.collectives.get(&kind) else {
        return 0.0;
    };
    calls.count as f64 * cost.fixed + calls.sent_bytes as f64 * cost.per_unit
}

/// Predicts the step time of the slowest rank of a pipeline, with the bubble from simulating the schedule. `ranks`
/// are the pipeline's ranks in order. The backward pass takes twice as long as the forward pass, half for inputs
/// and half for weights; `forwards` is the number of forward passes: two with full recomputation.
pub fn predict_pipeline(
    profile: &NodeProfile,
    schedule: &Schedule,
    ranks: &[DryRun],
    forwards: f64,
) -> Result<StepBreakdown, ProfileError> {
    let each: Vec<StepBreakdown> = ranks.iter().map(|run| predict(profile, run)).collect();
    let slowest = each.iter().max_by(|a, b| a.busy().total_cmp(&b.busy()));
    let Some(&slowest) = slowest else {
        return Err(ProfileError::Empty("the list of pipeline ranks"));
    };
    let busy: Vec<f64> = each
        .iter()
        .map(|rank| rank.busy() - rank.optimizer)
        .collect();
    Ok(StepBreakdown {
        bubble: pipeline_bubble(schedule, &busy, forwards)?,
        ..slowest
    })
}

/// The idle time of the slowest rank of a pipeline whose ranks compute for `busy` seconds of a step each.
pub(crate) fn pipeline_bubble(
    schedule: &Schedule,
    busy: &[f64],
    forwards: f64,
) -> Result<f64, ScheduleError> {
    let num_passes = (schedule.num_stages() / busy.len() * schedule.num_microbatches) as f64;
    let costs: Vec<(f64, f64, f64)> = (0..schedule.num_stages())
        .map(|stage| {
            let rank = schedule.stage_to_rank[stage].min(busy.len() - 1);
            let pass = busy[rank] / num_passes / (2.0 + forwards);
            (pass, forwards * pass, pass)
        })
        .collect();
    let end = simulate(schedule, &Costs::per_stage(&costs))?.end();
    let slowest = busy.iter().copied().fold(0.0, f64::max);
    Ok((end - slowest).max(0.0))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use trainyard_schedule::ScheduleKind;
    use trainyard_trace::CollectiveKind::{AllReduce, Recv, Send};

    use super::*;
    use crate::cost_model::linear::LinearCost;
    use crate::cost_model::profile::OperatorCost;
    use crate::cost_model::sync_points::StragglerWait;

    fn profile() -> NodeProfile {
        let linear = |fixed, per_unit| LinearCost { fixed, per_unit };
        let over_flops = true;
        let mm = OperatorCost {
            over_flops,
            cost: linear(1e-6, 1e-9),
            samples: Vec::new(),
        };
        NodeProfile {
            num_ranks: 2,
            operators: BTreeMap::from([("aten::mm".to_owned(), mm)]),
            collectives: BTreeMap::from([
                ("all_reduce".to_owned(), linear(1e-4, 1e-9)),
                ("send_recv".to_owned(), linear(1e-5, 1e-9)),
            ]),
            straggler_wait: StragglerWait {
                share: 0.1,
                interval: 1.0,
            },
            host_gap: 1e-6,
            default_cost: linear(2e-6, 1e-9),
        }
    }

    fn run(kinds: &[CollectiveKind]) -> DryRun {
        let calls = |name: &str, flops| Calls {
            name: name.to_owned(),
            flops,
            elements: 1000,
            count: 10,
            ..Calls::default()
        };
        let collective = |kind| CollectiveCalls {
            kind,
            purpose: Purpose::Gradient,
            count: 2,
            sent_bytes: 1_000_000,
        };
        DryRun {
            operators: vec![calls("aten::mm", 1_000_000), calls("aten::new", 0)],
            collectives: kinds.iter().map(|&kind| collective(kind)).collect(),
        }
    }

    #[test]
    fn every_call_and_byte_has_a_cost() {
        let step = predict(&profile(), &run(&[AllReduce]));
        assert!((step.compute - (10.0 * 1.001e-3 + 10.0 * 3e-6)).abs() < 1e-9);
        assert!((step.extrapolated - 10.0 * 3e-6).abs() < 1e-12);
        assert!((step.host - 20e-6).abs() < 1e-12);
        assert!((step.communication - 1.2e-3).abs() < 1e-12);
        assert!((step.straggler_wait - 0.1 * (step.compute + step.host)).abs() < 1e-12);
        assert_eq!(predict(&profile(), &run(&[Recv])).communication, 0.0);
        assert_eq!(predict(&profile(), &run(&[Send])).straggler_wait, 0.0);
    }

    #[test]
    fn equal_stages_have_the_schedules_bubble() {
        let schedule = ScheduleKind::OneForwardOneBackward.build(2, 8, 1).unwrap();
        let ranks = [run(&[Send, Recv]), run(&[Send, Recv])];
        let step = predict_pipeline(&profile(), &schedule, &ranks, 1.0).unwrap();
        let share = step.bubble / step.total();
        assert!((0.08..0.14).contains(&share), "{share}");
    }
}
