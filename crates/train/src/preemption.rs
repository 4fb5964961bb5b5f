//! Graceful shutdown on preemption: after SIGTERM all ranks finish the same step and save a checkpoint.
//!
//! SIGTERM only sets a flag. About twice a second the ranks all-reduce their flags, after the same step on
//! every rank, so that all ranks stop together and the steps in between cost nothing. If the launcher has
//! aborted the job, collectives may hang, so the process exits on SIGTERM at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use tch::Tensor;
use trainyard_heartbeat::HeartbeatSlot;
use trainyard_torch::{Group, ReduceOp, World};
use trainyard_trace::Purpose;

use crate::error::{Result, TrainError};

/// Target time between two checks of the flags.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Upper limit on the steps between two checks, for jobs with very short steps.
const MAX_STEPS_BETWEEN_CHECKS: u64 = 256;
/// How long a rank waits for its own SIGTERM after another rank was preempted and all ranks have saved.
const SIGTERM_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a waiting rank checks its flag.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Whether this process has received SIGTERM.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Handles SIGTERM from now on, in jobs of one rank and under `trainyard run`. Elsewhere SIGTERM keeps
    /// its default action: ranks may hang in a collective, and only our launcher marks a job as aborted.
    pub fn watch_sigterm(&self) -> io::Result<()> {
        let is_alone = std::env::var("WORLD_SIZE").map_or(true, |size| size == "1");
        let slot = HeartbeatSlot::from_env().unwrap_or_else(|error| {
            tracing::warn!("cannot reach the memory of the launcher: {error}");
            None
        });
        if !is_alone && slot.is_none() {
            return Ok(());
        }
        let mut signals = Signals::new([SIGTERM])?;
        let is_set = Arc::clone(&self.0);
        let thread = thread::Builder::new().name("sigterm".to_owned());
        thread.spawn(move || {
            for _ in signals.forever() {
                is_set.store(true, Ordering::Relaxed);
                // The training loop may hang in a collective of an aborted job: exit at once.
                if slot.as_ref().is_some_and(HeartbeatSlot::is_aborted) {
                    let _ = emulate_default_handler(SIGTERM);
                }
            }
        })?;
        Ok(())
    }

    /// Whether SIGTERM was received.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Makes all ranks stop after the same step when one of them is preempted.
pub(crate) struct PreemptionHandler {
    stop_flag: StopFlag,
    world_group: Group,
    /// The step and time of the last check.
    last: (u64, Instant),
    /// The step of the next check, the same on all ranks.
    next: u64,
}

impl PreemptionHandler {
    /// A handler for a job that has taken `step` steps.
    pub fn new(stop_flag: StopFlag, world: &World, step: u64) -> Result<PreemptionHandler> {
        Ok(PreemptionHandler {
            stop_flag,
            world_group: world.world_group()?,
            last: (step, Instant::now()),
            next: step + 1,
        })
    }

    /// Whether all ranks stop after this step because one of them received SIGTERM. All ranks must call
    /// this after every step.
    pub fn should_stop(&mut self, step: u64) -> Result<bool> {
        if step < self.next {
            return Ok(false);
        }
        let (last_step, last_time) = std::mem::replace(&mut self.last, (step, Instant::now()));
        let step_time =
            last_time.elapsed() / u32::try_from(step - last_step).unwrap_or(u32::MAX).max(1);
        // The maximum of negated counts is the minimum: the slowest rank determines the next check.
        let flags = [
            i64::from(self.stop_flag.is_set()),
            -steps_until_next(step_time),
        ];
        let flags = Tensor::from_slice(&flags);
        let work = self
            .world_group
            .all_reduce(&flags, ReduceOp::Max, Purpose::Control)?;
        work.wait()?;
        self.next = step + flags.f_int64_value(&[1])?.unsigned_abs();
        Ok(flags.f_int64_value(&[0])? > 0)
    }

    /// Returns when this rank has received SIGTERM too. The launcher of a node that continues without the
    /// preempted one stops its workers itself; a worker that exited earlier would count as finished.
    pub fn wait_for_sigterm(&self) -> Result<()> {
        let began = Instant::now();
        while !self.stop_flag.is_set() {
            if began.elapsed() > SIGTERM_TIMEOUT {
                let waited = SIGTERM_TIMEOUT;
                return Err(TrainError::SigtermTimeout { waited });
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

/// The number of steps until the next check, for steps of this duration.
fn steps_until_next(step_time: Duration) -> i64 {
    let steps = CHECK_INTERVAL.as_secs_f64() / step_time.as_secs_f64().max(1e-9);
    (steps as u64).clamp(1, MAX_STEPS_BETWEEN_CHECKS) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_steps_are_checked_one_by_one_and_short_steps_in_groups() {
        assert_eq!(steps_until_next(Duration::from_secs(30)), 1);
        assert_eq!(steps_until_next(Duration::from_millis(499)), 1);
        assert_eq!(steps_until_next(Duration::from_millis(20)), 25);
        assert_eq!(steps_until_next(Duration::ZERO), 256);
    }
}
