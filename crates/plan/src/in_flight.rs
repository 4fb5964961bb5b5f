//! Activations of all micro-batches that a pipeline rank has in flight.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use trainyard_schedule::{Schedule, ScheduleKind, StageHeld, in_flight};

use crate::Strategy;

/// What defines a schedule: its kind, its ranks, micro-batches and stages per rank.
type Key = (ScheduleKind, usize, usize, usize);

thread_local! {
    /// Schedules that were built before: a search asks for few of them, many times.
    static BUILT: RefCell<HashMap<Key, Option<Rc<Schedule>>>> = RefCell::default();
}

/// The most that a rank holds at once, if stage `s` holds `of_stage(s)` for a micro-batch.
///
/// One stage per rank whose backward pass is not split holds the same for every micro-batch, so a closed form counts them.
/// Otherwise stages differ, and the order of the rank's actions decides.
pub(crate) fn held(strategy: &Strategy, rank: usize, of_stage: impl Fn(usize) -> StageHeld) -> f64 {
    let (pp, pipeline) = (strategy.degrees.pp, &strategy.pipeline);
    let (kind, num_microbatches) = (pipeline.schedule, strategy.num_microbatches());
    let is_counted = matches!(
        kind,
        ScheduleKind::GPipe
            | ScheduleKind::OneForwardOneBackward
            | ScheduleKind::EagerOneForwardOneBackward
    );
    if pp == 1 {
        return of_stage(0).activations;
    }
    if is_counted {
        let count = in_flight(kind, pp, num_microbatches, 1, rank);
        return count as f64 * of_stage(rank).activations;
    }
    let num_microbatches = num_microbatches.min(enough(kind, pp, num_microbatches));
    let key = (kind, pp, num_microbatches, pipeline.stages_per_rank);
    let schedule = BUILT.with_borrow_mut(|built| {
        let (kind, pp, num_microbatches, stages_per_rank) = key;
        let build = || {
            kind.build(pp, num_microbatches, stages_per_rank)
                .ok()
                .map(Rc::new)
        };
        built.entry(key).or_insert_with(build).clone()
    });
    match schedule {
        Some(schedule) => {
            let mut of_own = vec![StageHeld::default(); strategy.num_stages()];
            for chunk in 0..pipeline.stages_per_rank {
                let stage = strategy.stage_at(rank, chunk);
                of_own[stage] = of_stage(stage);
            }
            schedule.peak_held(rank, |stage| of_own[stage])
        }
        // An impossible schedule is rejected elsewhere.
        None => f64::INFINITY,
    }
}

/// So many micro-batches of a schedule hold as much at once as all `num_microbatches`: more of them repeat the same order,
/// except where every one is in flight before the first backward pass.
fn enough(kind: ScheduleKind, num_ranks: usize, num_microbatches: usize) -> usize {
    match kind {
        ScheduleKind::LoopedBreadthFirst => num_microbatches,
        _ => 3 * num_ranks + num_microbatches % num_ranks,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn more_microbatches_than_enough_hold_no_more(
            kind in prop::sample::select(vec![
                ScheduleKind::Interleaved,
                ScheduleKind::LoopedBreadthFirst,
                ScheduleKind::ZeroBubbleH1,
                ScheduleKind::ZeroBubbleV,
                ScheduleKind::DualPipeV,
            ]),
            pp in 2usize..6,
            num_microbatches in 1usize..60,
            of_stages in prop::collection::vec((0u8..9, 0u8..9), 15),
        ) {
            let chunks = kind.num_chunks().unwrap_or(3);
            let of_stage = |stage: usize| StageHeld {
                activations: f64::from(of_stages[stage].0),
                weight_gradients: f64::from(of_stages[stage].1),
            };
            let capped = num_microbatches.min(enough(kind, pp, num_microbatches));
            let (Ok(all), Ok(few)) = (kind.build(pp, num_microbatches, chunks), kind.build(pp, capped, chunks)) else {
                return Ok(());
            };
            for rank in 0..pp {
                prop_assert_eq!(few.peak_held(rank, of_stage), all.peak_held(rank, of_stage));
            }
        }
    }
}
