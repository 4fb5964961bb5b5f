//! Signals sent to the launcher, as a file descriptor to poll.
//!
//! While a job runs, the launcher reads signals here and forwards them to the job. Between jobs they have their
//! default effect, so a program that launches several jobs can be interrupted at any time.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

/// The signals that end a job, the same as torchrun's.
const HANDLED: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT];

/// Whether no job runs, so that signals have their default effect.
static IDLE: AtomicBool = AtomicBool::new(true);
static NUM_JOBS: Mutex<usize> = Mutex::new(0);

/// The signals that arrive while this value lives.
#[derive(Debug)]
pub struct Signals(SignalDelivery<UnixStream, SignalOnly>);

impl Signals {
    /// Starts to receive the signals that end a job, and `others`.
    pub fn watch(others: &[i32]) -> io::Result<Signals> {
        let handled = handled(others);
        keep_default_effect_when_idle(&handled)?;
        let (read, write) = UnixStream::pair()?;
        let delivery = SignalDelivery::with_pipe(read, write, SignalOnly, &handled)?;
        count_jobs(|jobs| jobs + 1);
        Ok(Signals(delivery))
    }

    /// The signals that have arrived since the last call.
    pub fn pending(&mut self) -> Vec<Signal> {
        self.0
            .pending()
            .filter_map(Signal::from_named_raw)
            .collect()
    }

    /// Whether signals have arrived since the last call of [`pending`](Self::pending).
    pub fn have_arrived(&self) -> bool {
        let mut fds = [PollFd::new(self, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|num_ready| num_ready > 0)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_read().as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        count_jobs(|jobs| jobs.saturating_sub(1));
    }
}

fn count_jobs(change: impl FnOnce(usize) -> usize) {
    let mut jobs = NUM_JOBS.lock().unwrap_or_else(PoisonError::into_inner);
    *jobs = change(*jobs);
    IDLE.store(*jobs == 0, Ordering::SeqCst);
}

/// A handler cannot be uninstalled; this one restores the default effect of the signals between jobs.
fn keep_default_effect_when_idle(signals: &[i32]) -> io::Result<()> {
    static INSTALLED: OnceLock<()> = OnceLock::new();
    if INSTALLED.set(()).is_ok() {
        for signal in signals {
            signal_hook::flag::register_conditional_default(*signal, &IDLE)?;
        }
    }
    Ok(())
}

/// The handled signals, without those that the parent process set to be ignored, as `nohup` does.
fn handled(others: &[i32]) -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = ignored_signals(&status);
    let usual = HANDLED.map(Signal::as_raw);
    let all: BTreeSet<i32> = usual.iter().chain(others).copied().collect();
    all.into_iter()
        .filter(|signal| ignored & (1 << (signal - 1)) == 0)
        .collect()
}

/// The mask of ignored signals in `/proc/PID/status`.
fn ignored_signals(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signal_mask_of_nohup_is_parsed() {
        let status = "Name:\tsh\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000001\n";
        assert_eq!(ignored_signals(status), 1 << (Signal::HUP.as_raw() - 1));
        assert_eq!(ignored_signals(""), 0);
    }
}
