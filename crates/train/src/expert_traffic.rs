//! How long rows are on their way to experts and back, and how fast they go.

use std::cell::RefCell;

use serde::{Deserialize, Serialize};
use tch::Tensor;
use trainyard_torch::{Group, ReduceOp, World};
use trainyard_trace::{Ledger, Purpose, Totals};

use crate::error::Result;

/// The exchanges of rows in the steps of a report, of all layers and micro-batches, forward and backward.
/// A rank that others wait for is slow on both ends: its peers' rows are on their way until it is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertTraffic {
    /// Rows to their experts.
    pub dispatch: Pace,
    /// What experts computed, back.
    pub combine: Pace,
}

/// Bytes and the time they took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    /// Seconds of a step, on the mean rank.
    pub seconds: f64,
    /// Bytes that a rank sends in a step, on the mean.
    pub bytes: f64,
    /// Bytes per second while some are on their way; zero where none are.
    pub bandwidth: f64,
}

impl Pace {
    /// Of sums over ranks and steps.
    fn of(nanoseconds: f64, bytes: f64, num_summed: f64) -> Pace {
        let seconds = nanoseconds / 1e9;
        Pace {
            seconds: seconds / num_summed,
            bytes: bytes / num_summed,
            bandwidth: match seconds > 0.0 {
                true => bytes / seconds,
                false => 0.0,
            },
        }
    }
}

/// Reads it off the ledger from report to report.
pub(crate) struct TrafficMeter {
    /// None where experts are not on different ranks.
    everyone: Option<Group>,
    ledger: Ledger,
    /// What had been counted at the last report, and after which step that was.
    last: RefCell<(Totals, u64)>,
}

impl TrafficMeter {
    pub(crate) fn new(world: &World) -> Result<TrafficMeter> {
        let several = world.mesh().ep() > 1;
        Ok(TrafficMeter {
            everyone: several.then(|| world.everyone()).transpose()?,
            ledger: world.ledger().clone(),
            last: RefCell::new((world.ledger().totals(), 0)),
        })
    }

    /// Since the last time, of all ranks, all of which must ask; `step` is the number of the last step.
    pub(crate) fn read(&self, step: u64) -> Result<Option<ExpertTraffic>> {
        let Some(everyone) = &self.everyone else {
            return Ok(None);
        };
        let now = self.ledger.totals();
        let (before, step_before) = self.last.replace((now.clone(), step));
        let since = now - before;
        let moving = |purpose| since.moving_ns.get(&purpose).copied().unwrap_or(0) as f64;
        let sent = |purpose| since.of_purpose(purpose).sent_bytes as f64;
        let (there, back) = (Purpose::Dispatch, Purpose::Combine);
        let own = [moving(there), sent(there), moving(back), sent(back)];
        let all = Tensor::from_slice(&own);
        everyone
            .all_reduce(&all, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        let all = Vec::<f64>::try_from(&all)?;
        let num_summed = everyone.size() as f64 * step.saturating_sub(step_before).max(1) as f64;
        Ok(Some(ExpertTraffic {
            dispatch: Pace::of(all[0], all[1], num_summed),
            combine: Pace::of(all[2], all[3], num_summed),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_is_that_of_the_mean_rank_and_step() {
        // Two ranks, five steps: ten milliseconds and a megabyte each.
        let pace = Pace::of(100e6, 10e6, 10.0);
        assert_eq!(pace.seconds, 0.01);
        assert_eq!(pace.bytes, 1e6);
        assert_eq!(pace.bandwidth, 1e8);
        assert_eq!(Pace::of(0.0, 0.0, 10.0), Pace::default());
    }
}
