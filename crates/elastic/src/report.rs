//! What became of a job, and the words for it: the first failure first.

use std::fmt::{self, Write};
use std::time::Duration;

use rustix::process::Signal;

/// Ends seen closer together than this cannot be told apart in time. A killed process closes its
/// connections before its end can be seen, so a neighbour that gives up may be seen to end first.
const SIMULTANEOUS: Duration = Duration::from_millis(100);

/// How a process ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum How {
    /// By itself, with this code.
    Exited(i32),
    /// By this signal.
    Killed(i32),
}

impl How {
    /// Whether this is how a process ends that did what it was meant to.
    pub fn is_success(self) -> bool {
        self == How::Exited(0)
    }

    /// The code a shell would give: the exit code, or 128 plus the signal.
    pub fn exit_code(self) -> u8 {
        let code = match self {
            How::Exited(code) => code,
            How::Killed(signal) => 128 + signal,
        };
        u8::try_from(code).unwrap_or(u8::MAX)
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            How::Exited(code) => write!(f, "exited with code {code}"),
            How::Killed(signal) => write!(f, "was killed by {}", signal_name(*signal)),
        }
    }
}

/// The end of one rank.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct End {
    /// Which rank.
    pub rank: usize,
    /// Its process.
    pub pid: u32,
    /// How it ended.
    pub how: How,
    /// How long after the start of the job this was seen.
    pub after: Duration,
    /// The last signal that the launcher had sent it before.
    pub told: Option<i32>,
    /// Why the launcher killed it, if it hung.
    pub hung: Option<String>,
    /// Where it was last, if it had a pulse: its step and its collective.
    pub whereabouts: Option<String>,
    /// Its last lines on stderr.
    pub last_lines: Vec<String>,
}

/// What became of a job whose ranks have all ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Outcome {
    /// The end of every rank, by rank.
    pub ends: Vec<End>,
    /// The rank that failed first, of its own accord.
    pub first_failure: Option<usize>,
    /// The signal sent to the launcher that ended the job.
    pub interrupted: Option<i32>,
}

impl Outcome {
    /// Judges the ends of all ranks, given by rank.
    pub(crate) fn new(ends: Vec<End>, interrupted: Option<i32>) -> Outcome {
        let first_failure = first_failure(&ends).map(|end| end.rank);
        Outcome {
            ends,
            first_failure,
            interrupted,
        }
    }

    /// Whether every rank did what it was meant to.
    pub fn is_success(&self) -> bool {
        self.exit_code() == 0
    }

    /// The code of the first failure, or of the interruption (128 plus the signal), or 0.
    pub fn exit_code(&self) -> u8 {
        match (self.failed(), self.interrupted) {
            (Some(end), _) => end.how.exit_code(),
            (None, Some(signal)) => How::Killed(signal).exit_code(),
            (None, None) => 0,
        }
    }

    /// What there is to tell a person: who failed first and how, its last lines, and what
    /// happened to the others. `None` when everything went well.
    pub fn report(&self) -> Option<String> {
        let mut text = String::new();
        match (self.failed(), self.interrupted) {
            (Some(end), _) => tell_first(&mut text, end),
            (None, Some(signal)) => {
                text.push_str(&format!("interrupted by {}", signal_name(signal)));
            }
            (None, None) => return None,
        }
        for end in &self.ends {
            if Some(end.rank) != self.first_failure {
                let _ = write!(text, "\n  {} {}", name(end), what_happened(end));
            }
        }
        Some(text)
    }

    /// Of that, the first part: who failed first and how, and its last lines.
    pub(crate) fn first_words(&self) -> Option<String> {
        let mut text = String::new();
        tell_first(&mut text, self.failed()?);
        Some(text)
    }

    fn failed(&self) -> Option<&End> {
        self.ends
            .iter()
            .find(|end| Some(end.rank) == self.first_failure)
    }
}

/// The end that brought down the others: the first bad one before the launcher told anybody to
/// end, except that a SIGKILL from elsewhere at about the same time goes before it.
fn first_failure(ends: &[End]) -> Option<&End> {
    let failures = || ends.iter().filter(|end| !end.how.is_success());
    let first = failures()
        .filter(|end| end.told.is_none())
        .min_by_key(|end| (end.after, end.rank))?;
    let kill = Signal::KILL.as_raw();
    failures()
        .filter(|end| end.how == How::Killed(kill) && end.told != Some(kill))
        .filter(|end| end.after <= first.after + SIMULTANEOUS)
        .min_by_key(|end| (end.after, end.rank))
        .or(Some(first))
}

fn tell_first(text: &mut String, end: &End) {
    let _ = match &end.hung {
        Some(why) => write!(
            text,
            "{} hung and was killed, {:.1?} after the start: {why}",
            name(end),
            end.after
        ),
        None => write!(
            text,
            "{} {}, {:.1?} after the start",
            name(end),
            end.how,
            end.after
        ),
    };
    if let Some(whereabouts) = &end.whereabouts {
        let _ = write!(text, "\n  it was {whereabouts}");
    }
    if !end.last_lines.is_empty() {
        text.push_str("\n  its last lines on stderr:");
        for line in &end.last_lines {
            let _ = write!(text, "\n    | {line}");
        }
    }
}

/// What happened to a rank that was not the first to fail.
fn what_happened(end: &End) -> String {
    match (end.told, end.how) {
        (None, How::Exited(0)) => "had finished".to_owned(),
        (None, how) => format!("then {how}"),
        (Some(told), How::Killed(signal)) if told == signal && told == Signal::KILL.as_raw() => {
            "did not end when told to: the launcher sent SIGKILL".to_owned()
        }
        (Some(told), How::Killed(signal)) if told == signal => {
            format!("was ended: the launcher sent {}", signal_name(told))
        }
        (Some(told), how) => format!("{how} after the launcher sent {}", signal_name(told)),
    }
}

fn name(end: &End) -> String {
    format!("rank {} (pid {})", end.rank, end.pid)
}

fn signal_name(signal: i32) -> String {
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

    fn end(rank: usize, how: How, millis: u64, told: Option<i32>) -> End {
        End {
            rank,
            pid: 100 + rank as u32,
            how,
            after: Duration::from_millis(millis),
            told,
            hung: None,
            whereabouts: None,
            last_lines: Vec::new(),
        }
    }

    #[test]
    fn the_first_failure_is_named_first() {
        let mut ends = vec![
            end(0, How::Killed(TERM), 1250, Some(TERM)),
            end(1, How::Exited(3), 1200, None),
            end(2, How::Killed(KILL), 3300, Some(KILL)),
            end(3, How::Exited(0), 100, None),
            end(4, How::Exited(1), 1300, Some(TERM)),
            end(5, How::Exited(1), 1200, None),
        ];
        ends[1].whereabouts = Some("in step 3, waiting in all_reduce 4 of tp (activation)".into());
        ends[1].last_lines = vec!["Traceback".into(), "ValueError: no".into()];
        let outcome = Outcome::new(ends, None);
        assert_eq!(outcome.exit_code(), 3);
        assert_eq!(
            outcome.report().unwrap(),
            "rank 1 (pid 101) exited with code 3, 1.2s after the start\n  \
             it was in step 3, waiting in all_reduce 4 of tp (activation)\n  \
             its last lines on stderr:\n    | Traceback\n    | ValueError: no\n  \
             rank 0 (pid 100) was ended: the launcher sent SIGTERM\n  \
             rank 2 (pid 102) did not end when told to: the launcher sent SIGKILL\n  \
             rank 3 (pid 103) had finished\n  \
             rank 4 (pid 104) exited with code 1 after the launcher sent SIGTERM\n  \
             rank 5 (pid 105) then exited with code 1"
        );
    }

    #[test]
    fn a_killed_rank_goes_before_a_neighbour_that_noticed_first() {
        let ends = vec![
            end(0, How::Exited(1), 1000, None),
            end(1, How::Killed(KILL), 1003, Some(TERM)),
        ];
        let outcome = Outcome::new(ends, None);
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
    fn a_kill_long_after_or_by_the_launcher_does_not() {
        let ends = vec![
            end(0, How::Exited(1), 1000, None),
            end(1, How::Killed(KILL), 1500, Some(TERM)),
            end(2, How::Killed(KILL), 1050, Some(KILL)),
        ];
        assert_eq!(Outcome::new(ends, None).first_failure, Some(0));
    }

    #[test]
    fn a_hung_rank_is_named_with_the_reason() {
        let mut hung = end(1, How::Killed(KILL), 9000, None);
        hung.hung = Some("rank 1 does not run".into());
        let ends = vec![end(0, How::Exited(1), 9001, None), hung];
        let outcome = Outcome::new(ends, None);
        assert_eq!(outcome.exit_code(), 137);
        assert!(outcome.report().unwrap().starts_with(
            "rank 1 (pid 101) hung and was killed, 9.0s after the start: rank 1 does not run\n"
        ));
    }

    #[test]
    fn an_interruption_is_nobodys_failure() {
        let ends = vec![
            end(0, How::Killed(2), 500, Some(2)),
            end(1, How::Exited(1), 500, Some(2)),
        ];
        let outcome = Outcome::new(ends, Some(2));
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
    fn success_needs_no_words() {
        let outcome = Outcome::new(vec![end(0, How::Exited(0), 5, None)], None);
        assert!(outcome.is_success());
        assert_eq!(outcome.report(), None);
    }

    proptest! {
        #[test]
        fn a_failure_nobody_asked_for_is_always_found(
            ends in prop::collection::vec((0i32..3, 0u64..5000, any::<bool>()), 1..12)
        ) {
            let ends: Vec<End> = ends
                .into_iter()
                .enumerate()
                .map(|(rank, (code, at, told))| {
                    end(rank, How::Exited(code), at, told.then_some(TERM))
                })
                .collect();
            let failed = ends.iter().filter(|e| e.told.is_none() && e.how != How::Exited(0));
            let earliest = failed.map(|end| end.after).min();
            let outcome = Outcome::new(ends, None);
            prop_assert_eq!(outcome.first_failure.map(|rank| outcome.ends[rank].after), earliest);
            prop_assert_eq!(outcome.is_success(), earliest.is_none());
        }
    }
}
