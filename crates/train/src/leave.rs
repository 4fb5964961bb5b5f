//! Leaving in time: a rank that is told to end finishes its step, and all ranks save together.
//!
//! SIGTERM only raises a flag. About twice a second the ranks compare their flags, after the same step on
//! all of them, so no rank goes on while another leaves, and the steps in between cost nothing. Of a broken
//! world, in which nobody can agree on anything, a rank is gone as soon as it is told.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use tch::Tensor;
use trainyard_torch::{Group, ReduceOp, World};
use trainyard_trace::{PULSE_FOLDER, Purpose, is_over};

use crate::error::{Result, TrainError};

/// How long may pass before a flag is seen.
const EVERY: Duration = Duration::from_millis(500);
/// However fast steps are.
const MOST_STEPS: u64 = 256;
/// How long a rank that was not told itself waits for that, when another was and all have saved.
const TOLD_WITHIN: Duration = Duration::from_secs(60);
const GLANCE: Duration = Duration::from_millis(10);

/// Whether this process was told to end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Asked(Arc<AtomicBool>);

impl Asked {
    /// Listens from now on, where that can do no harm: ranks may hang in a broken world, and only our own
    /// launcher says when theirs is.
    pub fn listen(&self) -> io::Result<()> {
        let is_alone = std::env::var("WORLD_SIZE").map_or(true, |size| size == "1");
        let board = std::env::var_os(PULSE_FOLDER).map(PathBuf::from);
        if !is_alone && board.is_none() {
            return Ok(());
        }
        let mut signals = Signals::new([SIGTERM])?;
        let asked = Arc::clone(&self.0);
        let thread = thread::Builder::new().name("told to end".to_owned());
        thread.spawn(move || {
            for _ in signals.forever() {
                asked.store(true, Ordering::Relaxed);
                // The loop may hang, and there is nothing to finish.
                if board.as_deref().is_some_and(is_over) {
                    let _ = emulate_default_handler(SIGTERM);
                }
            }
        })?;
        Ok(())
    }

    /// Whether it was.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The agreement of all ranks to leave.
pub(crate) struct Leave {
    asked: Asked,
    everyone: Group,
    /// The step after which flags were compared last, and when.
    last: (u64, Instant),
    /// The step after which they are compared next: the same on all ranks.
    next: u64,
}

impl Leave {
    /// After so many steps.
    pub fn new(asked: Asked, world: &World, step: u64) -> Result<Leave> {
        Ok(Leave {
            asked,
            everyone: world.everyone()?,
            last: (step, Instant::now()),
            next: step + 1,
        })
    }

    /// Whether all ranks leave after this step, because one of them was told to. All must ask.
    pub fn is_agreed(&mut self, step: u64) -> Result<bool> {
        if step < self.next {
            return Ok(false);
        }
        let (last_step, last_time) = std::mem::replace(&mut self.last, (step, Instant::now()));
        let pace = last_time.elapsed() / u32::try_from(step - last_step).unwrap_or(u32::MAX).max(1);
        // The largest of the negative is the smallest: who is slowest looks soonest.
        let words = [i64::from(self.asked.is_set()), -steps_until_next(pace)];
        let words = Tensor::from_slice(&words);
        let work = self
            .everyone
            .all_reduce(&words, ReduceOp::Max, Purpose::Control)?;
        work.wait()?;
        self.next = step + words.f_int64_value(&[1])?.unsigned_abs();
        Ok(words.f_int64_value(&[0])? > 0)
    }

    /// Returns when this rank was told to end too: a launcher that is to go on without another machine
    /// ends its ranks, and takes one that ends by itself for one that is done.
    pub fn wait_until_told(&self) -> Result<()> {
        let began = Instant::now();
        while !self.asked.is_set() {
            if began.elapsed() > TOLD_WITHIN {
                let waited = TOLD_WITHIN;
                return Err(TrainError::LeftBehind { waited });
            }
            thread::sleep(GLANCE);
        }
        Ok(())
    }
}

/// How many steps of such a length there may be until flags are compared again.
fn steps_until_next(pace: Duration) -> i64 {
    let steps = EVERY.as_secs_f64() / pace.as_secs_f64().max(1e-9);
    (steps as u64).clamp(1, MOST_STEPS) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_steps_are_looked_after_one_by_one_and_short_ones_not() {
        assert_eq!(steps_until_next(Duration::from_secs(30)), 1);
        assert_eq!(steps_until_next(Duration::from_millis(499)), 1);
        assert_eq!(steps_until_next(Duration::from_millis(20)), 25);
        assert_eq!(steps_until_next(Duration::ZERO), 256);
    }
}
