//! The decision how a job ends: who is told what, and when.

use std::time::{Duration, Instant};

use rustix::process::Signal;

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

impl Phase {
    /// The phase after an event, and the signal to send to every rank that is left.
    pub(crate) fn after(
        self,
        event: Event,
        now: Instant,
        grace: Duration,
    ) -> (Phase, Option<Signal>) {
        let ending = Phase::Ending(now + grace);
        match (self, event) {
            (Phase::Running, Event::Failure) => (ending, Some(Signal::TERM)),
            (Phase::Running, Event::Signal(signal)) => (ending, Some(signal)),
            // Whoever asks twice does not want to wait.
            (Phase::Ending(_), Event::Signal(_)) => (Phase::Killed, Some(Signal::KILL)),
            (Phase::Ending(end), Event::Tick) if now >= end => (Phase::Killed, Some(Signal::KILL)),
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
        assert_eq!(sent, Some(Signal::TERM));
        assert_eq!(ending.patience(now), Some(GRACE));
        assert_eq!(ending.after(Event::Failure, now, GRACE), (ending, None));
        assert_eq!(ending.after(Event::Tick, now, GRACE), (ending, None));
        assert_eq!(
            ending.after(Event::Tick, now + GRACE, GRACE),
            (Phase::Killed, Some(Signal::KILL))
        );
    }

    #[test]
    fn a_signal_is_passed_on_and_a_second_one_kills() {
        let now = Instant::now();
        let (ending, sent) = Phase::Running.after(Event::Signal(Signal::INT), now, GRACE);
        assert_eq!(sent, Some(Signal::INT));
        let (killed, sent) = ending.after(Event::Signal(Signal::INT), now, GRACE);
        assert_eq!((killed, sent), (Phase::Killed, Some(Signal::KILL)));
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
                let (next, signal) = phase.after(event, now, GRACE);
                phase = next;
                sent.extend(signal);
            }
            prop_assert!(sent.len() <= 2);
            if let Some(second) = sent.get(1) {
                prop_assert_eq!(*second, Signal::KILL);
            }
        }
    }
}
