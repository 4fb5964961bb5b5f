//! The decision how a job ends: who is told what, and when.

use std::time::{Duration, Instant};

use rustix::process::Signal;

/// After a failure the others may hang in a collective with somebody who is gone.
const BROKEN_GRACE: Duration = Duration::from_secs(2);

/// How far a job is from its end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Phase {
    /// Nothing has failed.
    Running,
    /// Every rank has been told to end; at this time those that are left are killed.
    Ending(Instant),
    /// Every rank has been killed.
    Killed,
}

/// What can change the phase.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Event {
    /// A rank ended badly.
    Failure,
    /// The launcher was sent a signal.
    Signal(Signal),
    /// Time has passed.
    Tick,
}

/// What is said to every rank that is left.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Word {
    /// To end, for there is nothing to finish.
    Dismiss,
    /// A signal.
    Signal(Signal),
}

const KILL: Word = Word::Signal(Signal::KILL);

impl Phase {
    /// The phase after an event, and what to say to every rank that is left. Those that are asked to end by
    /// a signal have all the grace there is.
    pub(crate) fn after(
        self,
        event: Event,
        now: Instant,
        grace: Duration,
    ) -> (Phase, Option<Word>) {
        let broken = now + grace.min(BROKEN_GRACE);
        match (self, event) {
            (Phase::Running, Event::Failure) => (Phase::Ending(broken), Some(Word::Dismiss)),
            (Phase::Running, Event::Signal(signal)) => {
                (Phase::Ending(now + grace), Some(Word::Signal(signal)))
            }
            // Whoever asks twice does not want to wait.
            (Phase::Ending(_), Event::Signal(_)) => (Phase::Killed, Some(KILL)),
            (Phase::Ending(end), Event::Tick) if now >= end => (Phase::Killed, Some(KILL)),
            _ => (self, None),
        }
    }

    /// How long nothing needs to be done unless something happens.
    pub(crate) fn patience(self, now: Instant) -> Option<Duration> {
        match self {
            Phase::Ending(end) => Some(end.saturating_duration_since(now)),
            Phase::Running | Phase::Killed => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRACE: Duration = Duration::from_secs(2);

    #[test]
    fn a_failure_ends_the_rest_politely_then_by_force() {
        let now = Instant::now();
        let (ending, sent) = Phase::Running.after(Event::Failure, now, GRACE);
        assert_eq!(sent, Some(Word::Dismiss));
        assert_eq!(ending.patience(now), Some(GRACE));
        assert_eq!(ending.after(Event::Failure, now, GRACE), (ending, None));
        assert_eq!(ending.after(Event::Tick, now, GRACE), (ending, None));
        assert_eq!(
            ending.after(Event::Tick, now + GRACE, GRACE),
            (Phase::Killed, Some(KILL))
        );
    }

    #[test]
    fn a_signal_is_passed_on_and_a_second_one_kills() {
        let now = Instant::now();
        let (ending, sent) = Phase::Running.after(Event::Signal(Signal::INT), now, GRACE);
        assert_eq!(sent, Some(Word::Signal(Signal::INT)));
        let (killed, sent) = ending.after(Event::Signal(Signal::INT), now, GRACE);
        assert_eq!((killed, sent), (Phase::Killed, Some(KILL)));
    }

    proptest! {
        #[test]
        fn ranks_are_told_once_and_killed_once(events in prop::collection::vec(0u8..3, 0..40)) {
            let start = Instant::now();
            let mut phase = Phase::Running;
            let mut sent = Vec::new();
            for (second, event) in events.into_iter().enumerate() {
                let event = [Event::Failure, Event::Signal(Signal::HUP), Event::Tick][event as usize];
                let now = start + Duration::from_secs(second as u64);
                let (next, word) = phase.after(event, now, GRACE);
                phase = next;
                sent.extend(word);
            }
            prop_assert!(sent.len() <= 2);
            if let Some(second) = sent.get(1) {
                prop_assert_eq!(*second, KILL);
            }
        }
    }
}
