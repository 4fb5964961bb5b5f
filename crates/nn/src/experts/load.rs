//! Expert load: the number of rows per expert, for metrics and load balancing.

use std::cell::RefCell;
use std::collections::BTreeMap;

use tch::Tensor;

use crate::{Context, Result};

/// The expert load of the current step, from this rank's tokens.
#[derive(Default)]
pub struct ExpertLoad(RefCell<Recorded>);

#[derive(Default)]
struct Recorded {
    step: u64,
    /// By the first sample of a micro-batch, so that a recomputed micro-batch counts once.
    counts: BTreeMap<u64, Counts>,
}

/// The counts of one micro-batch.
pub(super) struct Counts {
    /// The number of rows that chose each expert [experts].
    pub chosen: Tensor,
    /// The number of rows dropped by the capacity limit [1]; `None` without a limit.
    pub dropped: Option<Tensor>,
}

impl ExpertLoad {
    /// Records the counts of a training micro-batch.
    pub(super) fn record(&self, counts: Counts, cx: &Context) {
        if !cx.training {
            return;
        }
        let mut recorded = self.0.borrow_mut();
        if recorded.step != cx.step {
            recorded.step = cx.step;
            recorded.counts.clear();
        }
        recorded.counts.insert(cx.first_sample, counts);
    }

    /// The number of rows that chose each expert in the last step `[experts]`; `None` before the first step.
    pub fn step_counts(&self) -> Result<Option<Tensor>> {
        sum(self.0.borrow().counts.values().map(|counts| &counts.chosen))
    }

    /// The number of rows of the last step that the capacity limit dropped `[1]`; `None` without a limit.
    pub fn step_dropped(&self) -> Result<Option<Tensor>> {
        let recorded = self.0.borrow();
        sum(recorded
            .counts
            .values()
            .filter_map(|counts| counts.dropped.as_ref()))
    }
}

fn sum<'a>(mut counts: impl Iterator<Item = &'a Tensor>) -> Result<Option<Tensor>> {
    let Some(first) = counts.next() else {
        return Ok(None);
    };
    let sum = counts.try_fold(first.shallow_clone(), |sum, more| sum.f_add(more))?;
    Ok(Some(sum))
}

impl std::fmt::Debug for ExpertLoad {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "ExpertLoad({} micro-batches)",
            self.0.borrow().counts.len()
        )
    }
}
