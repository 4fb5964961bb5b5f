//! The shutdown state machine of a job: which signal the ranks get, and when.

use std::time::{Duration, Instant};

use rustix::process::Signal;

/// After a failure the other ranks may block in a collective with a rank that is gone.
const BROKEN_GRACE: Duration = Duration::from_secs(2);

/// How far the shutdown of a job has progressed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Phase {
    /// No rank has failed.
    Running,
    /// The launcher has signaled every rank, and kills the remaining ones at this time.
    Stopping(Instant),
    /// The launcher has killed every rank.
    Killed,
}

/// What can change the phase.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Event {
    /// A rank failed.
    Failure,
    /// The launcher received a signal.
    Signal(Signal),
    /// Time has passed.
    Tick,
}

/// What the launcher does to every remaining rank.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ShutdownCommand {
    /// Sends SIGTERM to a broken world, in which no rank has anything to finish.
    Abort,
    /// Sends a signal.
    Signal(Signal),
}

const KILL: ShutdownCommand = ShutdownCommand::Signal(Signal::KILL);

impl Phase {
    /// The phase after an event, and the command for every remaining rank. Only a signal gives ranks the full
    /// grace period: then they can still save.
    pub(crate) fn after(
        self,
        event: Event,
        now: Instant,
        grace: Duration,
    ) -> (Phase, Option<ShutdownCommand>) {
        let broken = now + grace.min(BROKEN_GRACE);
        match (self, event) {
            (Phase::Running, Event::Failure) => {
                (Phase::Stopping(broken), Some(ShutdownCommand::Abort))
            }
            (Phase::Running, Event::Signal(signal)) => (
                Phase::Stopping(now + grace),
                Some(ShutdownCommand::Signal(signal)),
            ),
            // A second signal means: do not wait.
            (Phase::Stopping(_), Event::Signal(_)) => (Phase::Killed, Some(KILL)),
            (Phase::Stopping(end), Event::Tick) if now >= end => (Phase::Killed, Some(KILL)),
            _ => (self, None),
        }
    }

    /// The time until the next command is due, if no other event happens.
    pub(crate) fn timeout(self, now: Instant) -> Option<Duration> {
        match self {
            Phase::Stopping(end) => Some(end.saturating_duration_since(now)),
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
    fn a_failure_stops_the_other_ranks_and_then_kills_them() {
        let now = Instant::now();
        let (stopping, sent) = Phase::Running.after(Event::Failure, now, GRACE);
        assert_eq!(sent, Some(ShutdownCommand::Abort));
        assert_eq!(stopping.timeout(now), Some(GRACE));
        assert_eq!(stopping.after(Event::Failure, now, GRACE), (stopping, None));
        assert_eq!(stopping.after(Event::Tick, now, GRACE), (stopping, None));
        assert_eq!(
            stopping.after(Event::Tick, now + GRACE, GRACE),
            (Phase::Killed, Some(KILL))
        );
    }

    #[test]
    fn a_signal_is_forwarded_and_a_second_one_kills() {
        let now = Instant::now();
        let (stopping, sent) = Phase::Running.after(Event::Signal(Signal::INT), now, GRACE);
        assert_eq!(sent, Some(ShutdownCommand::Signal(Signal::INT)));
        let (killed, sent) = stopping.after(Event::Signal(Signal::INT), now, GRACE);
        assert_eq!((killed, sent), (Phase::Killed, Some(KILL)));
    }

    proptest! {
        #[test]
        fn ranks_are_signaled_once_and_killed_once(events in prop::collection::vec(0u8..3, 0..40)) {
            let start = Instant::now();
            let mut phase = Phase::Running;
            let mut sent = Vec::new();
            for (second, event) in events.into_iter().enumerate() {
                let event = [Event::Failure, Event::Signal(Signal::HUP), Event::Tick][event as usize];
                let now = start + Duration::from_secs(second as u64);
                let (next, command) = phase.after(event, now, GRACE);
                phase = next;
                sent.extend(command);
            }
            prop_assert!(sent.len() <= 2);
            if let Some(second) = sent.get(1) {
                prop_assert_eq!(*second, KILL);
            }
        }
    }
}
