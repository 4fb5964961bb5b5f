//! An agent's side: what it may believe, without anything that sends.
//!
//! An agent that cannot reach whoever decides must stop by itself before others take its place. Its lease
//! counts from when it *sent* the heartbeat that was answered; the decider counts from when it came, which is
//! later. So an agent always knows first, without comparing clocks.

use std::time::Duration;

use crate::{Decision, Epoch};

/// What an agent knows of its run.
#[derive(Clone, Debug)]
pub struct Attendance {
    lease: Duration,
    /// None: no lease was ever given.
    valid_until: Option<Duration>,
    version: Option<u64>,
    told: Decision,
    /// The newest epoch it has heard of.
    seen: Epoch,
    /// Workers of this epoch had to be stopped; it is never gone back to.
    lapsed: Option<Epoch>,
}

impl Attendance {
    /// Of an agent that has not joined yet.
    pub fn new(lease: Duration) -> Attendance {
        Attendance {
            lease,
            valid_until: None,
            version: None,
            told: Decision::Wait {
                epoch: Epoch(0),
                reason: "joining".into(),
            },
            seen: Epoch(0),
            lapsed: None,
        }
    }

    /// A heartbeat or a join that left at `sent` was answered.
    pub fn renewed(&mut self, sent: Duration) {
        let until = sent.saturating_add(self.lease);
        self.valid_until = self.valid_until.max(Some(until));
    }

    /// A decision came. Old ones, which may come late or twice, change nothing.
    pub fn told(&mut self, version: u64, decision: Decision) {
        if self.version.is_some_and(|newest| version < newest) {
            return;
        }
        self.version = Some(version);
        self.seen = self.seen.max(epoch_of(&decision).unwrap_or_default());
        self.told = decision;
    }

    /// When the lease ends if nothing more is heard.
    pub fn lapses_at(&self) -> Option<Duration> {
        self.valid_until
    }

    /// The newest epoch heard of.
    pub fn seen(&self) -> Epoch {
        self.seen
    }

    /// What to do now. An agent whose lease has lapsed stops its workers, and does not start those of that
    /// epoch again, whatever it hears.
    pub fn decide(&mut self, now: Duration) -> Decision {
        let Decision::Run(place) = &self.told else {
            return self.told.clone();
        };
        if self.valid_until.is_none_or(|until| now >= until) {
            self.lapsed = self.lapsed.max(Some(place.epoch));
        }
        if self.lapsed >= Some(place.epoch) {
            return Decision::Wait {
                epoch: place.epoch,
                reason: "the lease lapsed: whoever decides was not reached in time".into(),
            };
        }
        self.told.clone()
    }
}

fn epoch_of(decision: &Decision) -> Option<Epoch> {
    match decision {
        Decision::Wait { epoch, .. } | Decision::Park { epoch } => Some(*epoch),
        Decision::Run(place) => Some(place.epoch),
        Decision::Close(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Address, Place};

    const SECOND: Duration = Duration::from_secs(1);

    fn run(epoch: u64) -> Decision {
        Decision::Run(Place {
            epoch: Epoch(epoch),
            node_rank: 0,
            num_nodes: 1,
            first_rank: 0,
            world_size: 1,
            restarts: 0,
            store: Address {
                host: "a".into(),
                port: 1,
            },
            holds_store: true,
        })
    }

    fn runs(attendance: &mut Attendance, seconds: u32) -> bool {
        matches!(attendance.decide(SECOND * seconds), Decision::Run(_))
    }

    #[test]
    fn a_lease_counts_from_when_the_answered_message_was_sent() {
        let mut attendance = Attendance::new(SECOND * 3);
        attendance.told(1, run(1));
        assert!(!runs(&mut attendance, 0), "no lease was given yet");
        let mut attendance = Attendance::new(SECOND * 3);
        attendance.renewed(SECOND);
        attendance.told(1, run(1));
        assert!(runs(&mut attendance, 3));
        assert!(!runs(&mut attendance, 4));
    }

    #[test]
    fn an_epoch_that_lapsed_is_never_gone_back_to() {
        let mut attendance = Attendance::new(SECOND * 3);
        attendance.renewed(SECOND);
        attendance.told(1, run(1));
        assert!(!runs(&mut attendance, 5));
        attendance.renewed(SECOND * 5);
        attendance.told(1, run(1));
        assert!(!runs(&mut attendance, 6));
        attendance.told(3, run(2));
        assert!(runs(&mut attendance, 6));
    }

    #[test]
    fn a_decision_that_comes_late_changes_nothing() {
        let mut attendance = Attendance::new(SECOND * 3);
        attendance.renewed(SECOND);
        attendance.told(3, run(2));
        attendance.told(1, run(1));
        assert_eq!(attendance.decide(SECOND), run(2));
    }
}
