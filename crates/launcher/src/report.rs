//! The outcome of a job, and its report: the first failure first.

use std::fmt::{self, Write};
use std::time::Duration;

use rustix::process::Signal;

use crate::RecordedError;

/// The order of exits closer together than this is not known. A killed process closes its connections before its exit
/// is visible, so the launcher may see a peer fail first.
const SIMULTANEOUS: Duration = Duration::from_millis(100);

/// How a process ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ExitStatus {
    /// The process exited with this code.
    Exited(i32),
    /// This signal killed the process.
    Signaled(i32),
}

impl ExitStatus {
    /// Whether the process exited with code 0.
    pub fn is_success(self) -> bool {
        self == ExitStatus::Exited(0)
    }

    /// The exit code as in a shell: the code itself, or 128 plus the signal.
    pub fn exit_code(self) -> u8 {
        let code = match self {
            ExitStatus::Exited(code) => code,
            ExitStatus::Signaled(signal) => 128 + signal,
        };
        u8::try_from(code).unwrap_or(u8::MAX)
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExitStatus::Exited(code) => write!(f, "exited with code {code}"),
            ExitStatus::Signaled(signal) => write!(f, "was killed by {}", signal_name(*signal)),
        }
    }
}

/// The exit of one worker.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct WorkerExit {
    /// Its global rank.
    pub rank: usize,
    /// Its process id.
    pub pid: u32,
    /// How it exited.
    pub status: ExitStatus,
    /// When the launcher saw the exit, measured from the start of the job.
    pub after: Duration,
    /// The last signal that the launcher had sent to it.
    pub last_signal: Option<i32>,
    /// Why the launcher killed it, if it hung.
    pub hang_reason: Option<String>,
    /// Whether the kernel's out-of-memory killer ended it.
    pub is_oom: bool,
    /// Its last position, if it wrote heartbeats: its step and its collective.
    pub last_position: Option<String>,
    /// The exception that it has recorded.
    pub recorded_error: Option<RecordedError>,
    /// The last lines of its stderr.
    pub stderr_tail: Vec<String>,
}

/// The outcome of a job whose workers have all exited.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Outcome {
    /// The exit of every worker, by rank.
    pub exits: Vec<WorkerExit>,
    /// The rank that failed first, not counting those that the launcher stopped.
    pub first_failure: Option<usize>,
    /// The signal to the launcher that ended the job.
    pub interrupted_by: Option<i32>,
}

impl Outcome {
    /// Determines the first failure; `exits` are by rank.
    pub(crate) fn new(exits: Vec<WorkerExit>, interrupted_by: Option<i32>) -> Outcome {
        let first_failure = first_failure(&exits).map(|exit| exit.rank);
        Outcome {
            exits,
            first_failure,
            interrupted_by,
        }
    }

    /// Whether every worker succeeded and the job was not interrupted.
    pub fn is_success(&self) -> bool {
        self.exit_code() == 0
    }

    /// The exit code of the first failure, or 128 plus the interrupting signal, or 0.
    pub fn exit_code(&self) -> u8 {
        match (self.failed(), self.interrupted_by) {
            (Some(exit), _) => exit.status.exit_code(),
            (None, Some(signal)) => ExitStatus::Signaled(signal).exit_code(),
            (None, None) => 0,
        }
    }

    /// Whether a worker failed in a way that a restart would not cure.
    pub fn has_final_failure(&self) -> bool {
        self.exits.iter().any(|exit| exit.status.is_final())
    }

    /// A report for the user: which rank failed first and how, its last lines, and what happened to the other ranks.
    /// `None` if the job succeeded.
    pub fn report(&self) -> Option<String> {
        let mut text = String::new();
        match (self.failed(), self.interrupted_by) {
            (Some(exit), _) => write_failure(&mut text, exit),
            (None, Some(signal)) => {
                text.push_str(&format!("interrupted by {}", signal_name(signal)));
            }
            (None, None) => return None,
        }
        for exit in &self.exits {
            if Some(exit.rank) != self.first_failure {
                let _ = write!(text, "\n  {} {}", name(exit), describe_exit(exit));
            }
        }
        Some(text)
    }

    /// Passes on the exception of the rank that failed first to the program that started this one, if it asked for it.
    pub fn forward_recorded_error(&self) {
        let Some(exit) = self.failed() else { return };
        let Some(recorded) = exit.recorded_error.clone() else {
            return;
        };
        let code = match exit.status {
            ExitStatus::Exited(code) => i64::from(code),
            ExitStatus::Signaled(signal) => -i64::from(signal),
        };
        if let Err(error) = recorded.forward_to_parent(code) {
            tracing::warn!("cannot pass on the error of rank {}: {error}", exit.rank);
        }
    }

    /// The first part of the report: which rank failed first and how, and its last lines.
    pub(crate) fn failure_report(&self) -> Option<String> {
        let mut text = String::new();
        write_failure(&mut text, self.failed()?);
        Some(text)
    }

    fn failed(&self) -> Option<&WorkerExit> {
        self.exits
            .iter()
            .find(|exit| Some(exit.rank) == self.first_failure)
    }
}

/// The failure that caused the others: the first one before the launcher signaled any rank. A rank that says itself why
/// the job must end takes precedence, and so does a SIGKILL of other origin at about the same time.
fn first_failure(exits: &[WorkerExit]) -> Option<&WorkerExit> {
    let failures = || exits.iter().filter(|exit| !exit.status.is_success());
    let is_final = |exit: &&WorkerExit| exit.status.is_final();
    if let Some(said) = failures()
        .filter(is_final)
        .min_by_key(|exit| (exit.after, exit.rank))
    {
        return Some(said);
    }
    let first = failures()
        .filter(|exit| exit.last_signal.is_none())
        .min_by_key(|exit| (exit.after, exit.rank))?;
    let kill = Signal::KILL.as_raw();
    failures()
        .filter(|exit| exit.status == ExitStatus::Signaled(kill) && exit.last_signal != Some(kill))
        .filter(|exit| exit.after <= first.after + SIMULTANEOUS)
        .min_by_key(|exit| (exit.after, exit.rank))
        .or(Some(first))
}

fn write_failure(text: &mut String, exit: &WorkerExit) {
    let _ = match &exit.hang_reason {
        Some(why) => write!(
            text,
            "{} hung and was killed, {:.1?} after the start: {why}",
            name(exit),
            exit.after
        ),
        None => write!(
            text,
            "{} {}{}, {:.1?} after the start",
            name(exit),
            exit.status,
            if exit.is_oom {
                " because the node, or its control group, ran out of memory"
            } else {
                ""
            },
            exit.after
        ),
    };
    if let Some(last_position) = &exit.last_position {
        let _ = write!(text, "\n  it was {last_position}");
    }
    let recorded = exit.recorded_error.as_ref().and_then(RecordedError::text);
    if let Some(recorded) = recorded {
        text.push_str("\n  the exception that it recorded:");
        for line in recorded.trim_end().lines() {
            let _ = write!(text, "\n    | {line}");
        }
    } else if !exit.stderr_tail.is_empty() {
        text.push_str("\n  last lines of its stderr:");
        for line in &exit.stderr_tail {
            let _ = write!(text, "\n    | {line}");
        }
    }
}

/// What happened to a rank that did not fail first.
fn describe_exit(exit: &WorkerExit) -> String {
    match (exit.last_signal, exit.status) {
        (None, ExitStatus::Exited(0)) => "had finished".to_owned(),
        (None, status) => format!("then {status}"),
        (Some(last_signal), ExitStatus::Signaled(signal))
            if last_signal == signal && last_signal == Signal::KILL.as_raw() =>
        {
            "did not stop in time: the launcher sent SIGKILL".to_owned()
        }
        (Some(last_signal), ExitStatus::Signaled(signal)) if last_signal == signal => {
            format!(
                "was stopped: the launcher sent {}",
                signal_name(last_signal)
            )
        }
        (Some(last_signal), status) => format!(
            "{status} after the launcher sent {}",
            signal_name(last_signal)
        ),
    }
}

fn name(exit: &WorkerExit) -> String {
    format!("rank {} (pid {})", exit.rank, exit.pid)
}

/// The name of a signal, such as `SIGTERM`.
pub fn signal_name(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => name.to_owned(),
        None => format!("signal {signal}"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TERM: i32 = 15;
    const KILL: i32 = 9;

    fn exit(rank: usize, status: ExitStatus, millis: u64, last_signal: Option<i32>) -> WorkerExit {
        WorkerExit {
            rank,
            pid: 100 + rank as u32,
            status,
            after: Duration::from_millis(millis),
            last_signal,
            hang_reason: None,
            is_oom: false,
            last_position: None,
            recorded_error: None,
            stderr_tail: Vec::new(),
        }
    }

    #[test]
    fn the_first_failure_is_named_first() {
        let mut exits = vec![
            exit(0, ExitStatus::Signaled(TERM), 1250, Some(TERM)),
            exit(1, ExitStatus::Exited(3), 1200, None),
            exit(2, ExitStatus::Signaled(KILL), 3300, Some(KILL)),
            exit(3, ExitStatus::Exited(0), 100, None),
            exit(4, ExitStatus::Exited(1), 1300, Some(TERM)),
            exit(5, ExitStatus::Exited(1), 1200, None),
        ];
        exits[1].last_position =
            Some("in step 3, waiting in all_reduce 4 of tp (activation)".into());
        exits[1].stderr_tail = vec!["Traceback".into(), "ValueError: no".into()];
        let outcome = Outcome::new(exits, None);
        assert_eq!(outcome.exit_code(), 3);
        assert_eq!(
            outcome.report().unwrap(),
            "rank 1 (pid 101) exited with code 3, 1.2s after the start\n  \
             it was in step 3, waiting in all_reduce 4 of tp (activation)\n  \
             last lines of its stderr:\n    | Traceback\n    | ValueError: no\n  \
             rank 0 (pid 100) was stopped: the launcher sent SIGTERM\n  \
             rank 2 (pid 102) did not stop in time: the launcher sent SIGKILL\n  \
             rank 3 (pid 103) had finished\n  \
             rank 4 (pid 104) exited with code 1 after the launcher sent SIGTERM\n  \
             rank 5 (pid 105) then exited with code 1"
        );
    }

    #[test]
    fn a_killed_rank_takes_precedence_over_a_peer_that_failed_first() {
        let exits = vec![
            exit(0, ExitStatus::Exited(1), 1000, None),
            exit(1, ExitStatus::Signaled(KILL), 1003, Some(TERM)),
        ];
        let outcome = Outcome::new(exits, None);
        assert_eq!(outcome.first_failure, Some(1));
        assert_eq!(outcome.exit_code(), 137);
        assert!(
            outcome
                .report()
                .unwrap()
                .starts_with("rank 1 (pid 101) was killed by SIGKILL")
        );
    }

    #[test]
    fn a_late_kill_or_one_by_the_launcher_does_not() {
        let exits = vec![
            exit(0, ExitStatus::Exited(1), 1000, None),
            exit(1, ExitStatus::Signaled(KILL), 1500, Some(TERM)),
            exit(2, ExitStatus::Signaled(KILL), 1050, Some(KILL)),
        ];
        assert_eq!(Outcome::new(exits, None).first_failure, Some(0));
    }

    #[test]
    fn a_hung_rank_is_named_with_the_reason() {
        let mut hung = exit(1, ExitStatus::Signaled(KILL), 9000, None);
        hung.hang_reason = Some("rank 1 is not running".into());
        let exits = vec![exit(0, ExitStatus::Exited(1), 9001, None), hung];
        let outcome = Outcome::new(exits, None);
        assert_eq!(outcome.exit_code(), 137);
        assert!(outcome.report().unwrap().starts_with(
            "rank 1 (pid 101) hung and was killed, 9.0s after the start: rank 1 is not running\n"
        ));
    }

    #[test]
    fn an_interruption_is_not_a_failure_of_a_rank() {
        let exits = vec![
            exit(0, ExitStatus::Signaled(2), 500, Some(2)),
            exit(1, ExitStatus::Exited(1), 500, Some(2)),
        ];
        let outcome = Outcome::new(exits, Some(2));
        assert_eq!(outcome.first_failure, None);
        assert_eq!(outcome.exit_code(), 130);
        assert!(
            outcome
                .report()
                .unwrap()
                .starts_with("interrupted by SIGINT")
        );
    }

    #[test]
    fn success_has_no_report() {
        let outcome = Outcome::new(vec![exit(0, ExitStatus::Exited(0), 5, None)], None);
        assert!(outcome.is_success());
        assert_eq!(outcome.report(), None);
    }

    proptest! {
        #[test]
        fn the_earliest_failure_is_always_found(
            exits in prop::collection::vec((0i32..3, 0u64..5000, any::<bool>()), 1..12)
        ) {
            let exits: Vec<WorkerExit> = exits
                .into_iter()
                .enumerate()
                .map(|(rank, (code, at, last_signal))| {
                    exit(rank, ExitStatus::Exited(code), at, last_signal.then_some(TERM))
                })
                .collect();
            let failed = exits.iter().filter(|e| e.last_signal.is_none() && e.status != ExitStatus::Exited(0));
            let earliest = failed.map(|exit| exit.after).min();
            let outcome = Outcome::new(exits, None);
            prop_assert_eq!(outcome.first_failure.map(|rank| outcome.exits[rank].after), earliest);
            prop_assert_eq!(outcome.is_success(), earliest.is_none());
        }
    }
}
