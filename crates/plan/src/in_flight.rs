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
    // More micro-batches repeat the same order.
    let enough = 3 * pp + num_microbatches % pp;
    let key = (
        kind,
        pp,
        num_microbatches.min(enough),
        pipeline.stages_per_rank,
    );
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
