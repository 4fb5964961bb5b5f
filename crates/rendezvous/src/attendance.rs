//! An agent's side: what it may believe, without anything that sends.
//!
//! An agent that cannot reach whoever decides must stop by itself before others take its place. Its lease
//! counts from when it *sent* the heartbeat that was answered; the decider counts from when it came, which is
//! later. So an agent always knows first, without comparing clocks; and it believes in its lease for a sixth
//! less, which is the time it has to kill its workers.

use std::time::Duration;

use crate::{Decision, Epoch, Seen};

/// What an agent knows of its run.
#[derive(Clone, Debug)]
pub struct Attendance {
    lease: Duration,
    /// None: no lease was ever given.
    valid_until: Option<Duration>,
    /// When the agent last asked for its lease to be kept.
    asked: Duration,
    version: Option<u64>,
    told: Decision,
    /// The record's version when the lease was last renewed: an older decision is out of date.
    floor: u64,
    /// The newest epoch it has heard of.
    seen: Epoch,
    /// It may have workers of this epoch.
    works: Option<Epoch>,
    /// Workers of this epoch and those before have been stopped; it is never gone back to.
    stopped: Epoch,
}

impl Attendance {
    /// Of an agent that has not joined yet.
    pub fn new(lease: Duration) -> Attendance {
        Attendance {
            lease,
            valid_until: None,
            asked: Duration::ZERO,
            version: None,
            floor: 0,
            told: joining(),
            seen: Epoch(0),
            works: None,
            stopped: Epoch(0),
        }
    }

    /// A heartbeat or a join that left at `sent` was answered, when the record was of this version.
    ///
    /// A decision of that version or a newer one holds as long as the lease: as long as this agent's lease lasts,
    /// no other world is formed before it has stopped its workers.
    pub fn renewed(&mut self, sent: Duration, version: u64) {
        self.floor = self.floor.max(version);
        let until = sent.saturating_add(self.lease - self.lease / 6);
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

    /// Which record the newest decision is from.
    pub fn version(&self) -> Option<u64> {
        self.version
    }

    /// The newest heard of.
    pub fn seen(&self) -> Seen {
        Seen {
            epoch: self.seen,
            version: self.version.unwrap_or(0),
        }
    }

    /// When an agent that hears nothing more gives up: so long after its lease, or after it began to ask.
    pub fn gives_up_at(&self, patience: Duration) -> Duration {
        self.valid_until
            .unwrap_or_default()
            .saturating_add(patience)
    }

    /// The agent asks for its lease to be kept.
    pub fn asked(&mut self, now: Duration) {
        self.asked = now;
    }

    /// Whether the agent, which was in once, asks for nothing any more: then its place is for others, and nobody
    /// asks in its name.
    pub fn hangs(&self, now: Duration) -> bool {
        self.valid_until.is_some() && now >= self.asked.saturating_add(self.lease)
    }

    /// Whether it may have workers.
    pub fn may_work(&self) -> bool {
        self.works.is_some()
    }

    /// The workers of an epoch are no more.
    pub fn stopped(&mut self, epoch: Epoch) {
        self.stopped = self.stopped.max(epoch);
        self.works = self.works.filter(|&works| works > epoch);
    }

    /// What to do now. An agent whose lease has lapsed kills its workers, even those it was stopping, and does not
    /// start those of that epoch again, whatever it hears.
    pub fn decide(&mut self, now: Duration) -> Decision {
        let holds = self.valid_until.is_some_and(|until| now < until);
        match (&self.told, self.works) {
            (_, Some(epoch)) if !holds => {
                self.stopped = self.stopped.max(epoch);
                Decision::Lapsed { epoch }
            }
            (Decision::Run(place), _) if place.epoch <= self.stopped => {
                Decision::Lapsed { epoch: place.epoch }
            }
            (Decision::Run(_), None) if !holds || self.version < Some(self.floor) => joining(),
            (Decision::Run(place), _) => {
                self.works = Some(place.epoch);
                self.told.clone()
            }
            _ => self.told.clone(),
        }
    }
}

fn joining() -> Decision {
    Decision::Wait {
        epoch: Epoch(0),
        reason: "joining".into(),
    }
}

fn epoch_of(decision: &Decision) -> Option<Epoch> {
    match decision {
        Decision::Wait { epoch, .. } | Decision::Park { epoch } | Decision::Lapsed { epoch } => {
            Some(*epoch)
        }
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
        let mut attendance = Attendance::new(SECOND * 6);
        attendance.renewed(SECOND, 0);
        attendance.told(1, run(1));
        assert!(runs(&mut attendance, 5));
        assert!(!runs(&mut attendance, 6), "it is believed in for 5 s of 6");
    }

    #[test]
    fn an_epoch_that_lapsed_is_never_gone_back_to() {
        let mut attendance = Attendance::new(SECOND * 3);
        attendance.renewed(SECOND, 0);
        attendance.told(1, run(1));
        assert!(runs(&mut attendance, 2));
        assert!(!runs(&mut attendance, 5));
        attendance.renewed(SECOND * 5, 0);
        attendance.told(1, run(1));
        assert!(!runs(&mut attendance, 6));
        attendance.told(3, run(2));
        assert!(runs(&mut attendance, 6));
    }

    #[test]
    fn split_brain_a_lease_that_lapses_while_workers_stop_kills_them() {
        let mut attendance = Attendance::new(SECOND * 3);
        attendance.renewed(SECOND, 0);
        attendance.told(1, run(1));
        assert!(runs(&mut attendance, 2));
        let wait = Decision::Wait {
            epoch: Epoch(1),
            reason: "more nodes have come".into(),
        };
        attendance.told(2, wait.clone());
        assert_eq!(attendance.decide(SECOND * 3), wait);
        let lapsed = Decision::Lapsed { epoch: Epoch(1) };
        assert_eq!(attendance.decide(SECOND * 4), lapsed);
        attendance.stopped(Epoch(1));
        assert_eq!(attendance.decide(SECOND * 5), wait);
    }

    #[test]
    fn split_brain_a_decision_from_before_the_lease_was_renewed_starts_nothing() {
        let mut attendance = Attendance::new(SECOND * 3);
        attendance.renewed(SECOND, 4);
        attendance.told(3, run(1));
        assert!(!runs(&mut attendance, 2));
        attendance.told(4, run(2));
        assert!(runs(&mut attendance, 2));
    }

    #[test]
    fn a_decision_that_comes_late_changes_nothing() {
        let mut attendance = Attendance::new(SECOND * 3);
        attendance.renewed(SECOND, 0);
        attendance.told(3, run(2));
        attendance.told(1, run(1));
        assert_eq!(attendance.decide(SECOND), run(2));
    }
}
