//! Time and bandwidth of token dispatch and combine in expert parallelism.

use std::cell::RefCell;

use serde::{Deserialize, Serialize};
use tch::Tensor;
use trainyard_torch::{Group, ReduceOp, World};
use trainyard_trace::{Ledger, Purpose, Totals};

use crate::error::Result;

/// All-to-all communication of expert parallelism since the last report, over all layers and micro-batches,
/// forward and backward. A straggler increases the times of its peers too, because their transfers wait
/// for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertTraffic {
    /// Sending tokens to their experts.
    pub dispatch: TransferStats,
    /// Sending expert outputs back.
    pub combine: TransferStats,
}

/// Bytes, time and bandwidth of transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransferStats {
    /// Seconds per step, averaged over ranks.
    pub seconds: f64,
    /// Bytes sent per step, averaged over ranks.
    pub bytes: f64,
    /// Bytes per second while transfers are in flight; zero without transfers.
    pub bandwidth: f64,
}

impl TransferStats {
    /// From sums over `num_summed` pairs of rank and step.
    fn of(nanoseconds: f64, bytes: f64, num_summed: f64) -> TransferStats {
        let seconds = nanoseconds / 1e9;
        TransferStats {
            seconds: seconds / num_summed,
            bytes: bytes / num_summed,
            bandwidth: if seconds > 0.0 { bytes / seconds } else { 0.0 },
        }
    }
}

/// Measures [`ExpertTraffic`] from the ledger, from report to report.
pub(crate) struct TrafficMeter {
    /// `None` without expert parallelism.
    world_group: Option<Group>,
    ledger: Ledger,
    /// Ledger totals and step number of the last report.
    last: RefCell<(Totals, u64)>,
}

impl TrafficMeter {
    pub(crate) fn new(world: &World) -> Result<TrafficMeter> {
        let several = world.mesh().ep() > 1;
        Ok(TrafficMeter {
            world_group: several.then(|| world.world_group()).transpose()?,
            ledger: world.ledger().clone(),
            last: RefCell::new((world.ledger().totals(), 0)),
        })
    }

    /// The traffic since the last call, averaged over all ranks; `step` is the number of steps taken. This
    /// is a collective call.
    pub(crate) fn read(&self, step: u64) -> Result<Option<ExpertTraffic>> {
        let Some(world_group) = &self.world_group else {
            return Ok(None);
        };
        let now = self.ledger.totals();
        let (before, step_before) = self.last.replace((now.clone(), step));
        let since = now - before;
        let moving = |purpose| since.communication_ns.get(&purpose).copied().unwrap_or(0) as f64;
        let sent = |purpose| since.of_purpose(purpose).sent_bytes as f64;
        let (dispatch, combine) = (Purpose::Dispatch, Purpose::Combine);
        let own = [
            moving(dispatch),
            sent(dispatch),
            moving(combine),
            sent(combine),
        ];
        let all = Tensor::from_slice(&own);
        world_group
            .all_reduce(&all, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        let all = Vec::<f64>::try_from(&all)?;
        let num_summed = world_group.size() as f64 * step.saturating_sub(step_before).max(1) as f64;
        Ok(Some(ExpertTraffic {
            dispatch: TransferStats::of(all[0], all[1], num_summed),
            combine: TransferStats::of(all[2], all[3], num_summed),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_are_averaged_over_ranks_and_steps() {
        // Two ranks, five steps: ten milliseconds and a megabyte each.
        let stats = TransferStats::of(100e6, 10e6, 10.0);
        assert_eq!(stats.seconds, 0.01);
        assert_eq!(stats.bytes, 1e6);
        assert_eq!(stats.bandwidth, 1e8);
        assert_eq!(TransferStats::of(0.0, 0.0, 10.0), TransferStats::default());
    }
}
