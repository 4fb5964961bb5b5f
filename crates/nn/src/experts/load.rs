//! How many rows each expert got, to be reported and to balance by.

use std::cell::RefCell;
use std::collections::BTreeMap;

use tch::Tensor;

use crate::{Context, Result};

/// The rows of a step so far, of this rank's tokens.
#[derive(Default)]
pub struct Load(RefCell<Noted>);

#[derive(Default)]
struct Noted {
    step: u64,
    /// By the first sample of a micro-batch: one that is computed again counts once.
    counts: BTreeMap<u64, Counts>,
}

/// Those of one micro-batch.
pub(super) struct Counts {
    /// For how many rows each expert was chosen [experts].
    pub chosen: Tensor,
    /// How many of those no expert had room for [1]; none where all have room for all.
    pub dropped: Option<Tensor>,
}

impl Load {
    /// Notes the rows of a micro-batch under training.
    pub(super) fn note(&self, counts: Counts, cx: &Context) {
        if !cx.training {
            return;
        }
        let mut noted = self.0.borrow_mut();
        if noted.step != cx.step {
            noted.step = cx.step;
            noted.counts.clear();
        }
        noted.counts.insert(cx.first_sample, counts);
    }

    /// For how many rows each expert was chosen in the last step `[experts]`; none before there was one.
    pub fn of_step(&self) -> Result<Option<Tensor>> {
        sum(self.0.borrow().counts.values().map(|counts| &counts.chosen))
    }

    /// How many of the last step's rows no expert had room for `[1]`; none where all have room for all.
    pub fn dropped_of_step(&self) -> Result<Option<Tensor>> {
        let noted = self.0.borrow();
        sum(noted
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

impl std::fmt::Debug for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Load({} micro-batches)", self.0.borrow().counts.len())
    }
}
