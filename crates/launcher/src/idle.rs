//! Hangs of programs that write no heartbeats, as far as they can be seen from outside.
//!
//! A rank that computes uses processor time; one that waits for another rank through Gloo does not. If no rank of this
//! node has used any for a minute, the job hangs, or it waits for something else: the launcher cannot tell, so it warns
//! and kills no rank. A rank that a signal has stopped is reported after seconds.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How often the launcher looks. Reading `/proc` takes microseconds per process.
const INTERVAL: Duration = Duration::from_secs(5);
/// A rank that has used no more than this share of a processor for this long is idle.
const MAX_SHARE: f64 = 0.005;
const IDLE_AFTER: Duration = Duration::from_secs(60);
/// Someone who debugs a rank stops it for a moment.
const STOPPED_AFTER: Duration = Duration::from_secs(10);
/// What `py-spy` may take, and how many ranks it is asked about.
const PY_SPY_TIMEOUT: &str = "10";
const MAX_RANKS_DUMPED: usize = 8;
/// The kernel's unit of processor time in `/proc`, the same on all Linux systems.
const TICKS_PER_SECOND: f64 = 100.0;

/// What `/proc` says about a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Usage {
    /// The processor time of the rank and its children, in ticks.
    ticks: u64,
    /// Whether a signal has stopped it.
    is_stopped: bool,
}

/// Watches ranks that write no heartbeats.
#[derive(Debug)]
pub(crate) struct IdleMonitor {
    next: Instant,
    ranks: BTreeMap<usize, Watched>,
    is_reported: bool,
}

#[derive(Debug)]
struct Watched {
    ticks: u64,
    /// Since when it has used next to nothing.
    idle_since: Instant,
    stopped_since: Option<Instant>,
}

impl IdleMonitor {
    pub(crate) fn new(now: Instant) -> IdleMonitor {
        IdleMonitor {
            next: now + INTERVAL,
            ranks: BTreeMap::new(),
            is_reported: false,
        }
    }

    /// Looks at ranks, if it is time, and says why they make no progress. Says it once.
    pub(crate) fn poll(&mut self, ranks: &[(usize, u32)], now: Instant) -> Option<String> {
        if now < self.next {
            return None;
        }
        self.next = now + INTERVAL;
        let usages = ranks
            .iter()
            .filter_map(|(rank, pid)| Some((*rank, usage(*pid)?)));
        self.record(usages.collect(), now)
    }

    fn record(&mut self, usages: BTreeMap<usize, Usage>, now: Instant) -> Option<String> {
        self.ranks.retain(|rank, _| usages.contains_key(rank));
        for (rank, usage) in usages {
            let watched = self.ranks.entry(rank).or_insert(Watched {
                ticks: usage.ticks,
                idle_since: now,
                stopped_since: None,
            });
            watched.update(usage, now);
        }
        let found = self.stopped(now).or_else(|| self.idle(now));
        let is_new = found.is_some() && !self.is_reported;
        self.is_reported = found.is_some();
        found.filter(|_| is_new)
    }

    fn stopped(&self, now: Instant) -> Option<String> {
        let mut ranks = self.ranks.iter();
        ranks.find_map(|(rank, watched)| {
            let stopped_for = now.duration_since(watched.stopped_since?);
            (stopped_for >= STOPPED_AFTER).then(|| {
                format!(
                    "rank {rank} does not run: a signal has stopped its process, {} s ago. `kill -CONT` lets it go on",
                    stopped_for.as_secs()
                )
            })
        })
    }

    fn idle(&self, now: Instant) -> Option<String> {
        let idle = self
            .ranks
            .values()
            .map(|watched| now.duration_since(watched.idle_since));
        let idle_for = idle.min().filter(|idle_for| *idle_for >= IDLE_AFTER)?;
        Some(format!(
            "no rank of this node has used the processor for {} s: the job hangs, or waits for something else",
            idle_for.as_secs()
        ))
    }
}

impl Watched {
    fn update(&mut self, usage: Usage, now: Instant) {
        let used = usage.ticks.saturating_sub(self.ticks) as f64 / TICKS_PER_SECOND;
        let elapsed = now.duration_since(self.idle_since).as_secs_f64();
        if used > MAX_SHARE * elapsed.max(INTERVAL.as_secs_f64()) {
            (self.ticks, self.idle_since) = (usage.ticks, now);
        }
        self.stopped_since = self
            .stopped_since
            .or(Some(now))
            .filter(|_| usage.is_stopped);
    }
}

/// The processor time of a process and of the processes it has started; `None` if it has exited.
fn usage(pid: u32) -> Option<Usage> {
    let (mut ticks, is_stopped) = stat(pid)?;
    let mut pids = children(pid);
    while let Some(child) = pids.pop() {
        ticks += stat(child).map_or(0, |(ticks, _)| ticks);
        pids.extend(children(child));
    }
    Some(Usage { ticks, is_stopped })
}

fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let text = text.unwrap_or_default();
    text.split_whitespace()
        .filter_map(|child| child.parse().ok())
        .collect()
}

/// The processor time of a process, with that of children which have exited, and whether it is stopped.
fn stat(pid: u32) -> Option<(u64, bool)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain anything.
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let ticks = fields.get(11..15)?.iter().map(|field| field.parse::<u64>());
    let ticks: Result<Vec<u64>, _> = ticks.collect();
    Some((ticks.ok()?.iter().sum(), *fields.first()? == "T"))
}

/// Logs where the Python code of ranks is, if `py-spy` is installed. Does not wait for it.
pub(crate) fn log_python_stacks(ranks: Vec<(usize, u32)>) {
    let dump = move || {
        for (rank, pid) in ranks.into_iter().take(MAX_RANKS_DUMPED) {
            match py_spy(pid) {
                Some(stack) => tracing::warn!("the Python stack of rank {rank}:\n{stack}"),
                None => return,
            }
        }
    };
    let thread = thread::Builder::new().name("py-spy".to_owned());
    if let Err(error) = thread.spawn(dump) {
        tracing::debug!("cannot start a thread for py-spy: {error}");
    }
}

fn py_spy(pid: u32) -> Option<String> {
    let mut command = Command::new("timeout");
    command.args([PY_SPY_TIMEOUT, "py-spy", "dump", "--pid", &pid.to_string()]);
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout)
        .trim_end()
        .to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn usages(ticks: &[u64], stopped: Option<usize>) -> BTreeMap<usize, Usage> {
        let usage = |(rank, ticks): (usize, &u64)| {
            let is_stopped = stopped == Some(rank);
            (
                rank,
                Usage {
                    ticks: *ticks,
                    is_stopped,
                },
            )
        };
        ticks.iter().enumerate().map(usage).collect()
    }

    #[test]
    fn a_job_is_idle_once_no_rank_has_used_the_processor_for_a_minute() {
        let start = Instant::now();
        let mut monitor = IdleMonitor::new(start);
        let mut reports = Vec::new();
        for second in (0..300).step_by(5) {
            // Rank 0 waits from the beginning, and rank 1 from second 100. Waiting takes a few ticks too.
            let busy = 100 * second.min(100);
            let few = second / 20;
            let found = monitor.record(
                usages(&[few, busy + few], None),
                start + second as u32 * SECOND,
            );
            reports.extend(found.map(|text| (second, text)));
        }
        assert_eq!(reports.len(), 1, "{reports:?}");
        assert!((155..=165).contains(&reports[0].0), "{reports:?}");
        assert!(reports[0].1.contains("no rank of this node"), "{reports:?}");
    }

    #[test]
    fn a_stopped_rank_is_named() {
        let start = Instant::now();
        let mut monitor = IdleMonitor::new(start);
        assert_eq!(monitor.record(usages(&[9, 9], None), start), None);
        assert_eq!(
            monitor.record(usages(&[500, 9], Some(1)), start + 5 * SECOND),
            None
        );
        let found = monitor.record(usages(&[900, 9], Some(1)), start + 15 * SECOND);
        assert!(found.is_some_and(|text| text.contains("rank 1 does not run")));
        assert_eq!(
            monitor.record(usages(&[999, 9], Some(1)), start + 20 * SECOND),
            None,
            "said once"
        );
    }

    #[test]
    fn this_process_uses_the_processor() {
        let usage = usage(std::process::id());
        assert!(usage.is_some_and(|usage| !usage.is_stopped));
    }
}
