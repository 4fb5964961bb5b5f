//! The agent's view of its lease and of the newest decision, without I/O.
//!
//! An agent that cannot reach the rendezvous must stop its workers before another node can take its rank. The agent
//! counts its lease from when it *sent* the heartbeat that was acknowledged; the decider counts from when the
//! heartbeat arrived, which is later. So the agent's lease always expires first, without comparing clocks. The agent
//! also trusts its lease for a sixth less than its length: that is the time it has to kill its workers.

use std::time::Duration;

use crate::{Decision, Epoch, RunOutcome, Watermark};

/// Tracks the lease of an agent and decides what the agent may do.
#[derive(Clone, Debug)]
pub struct LeaseTracker {
    lease: Duration,
    /// `None` before the first lease is granted.
    valid_until: Option<Duration>,
    /// When the agent last sent a heartbeat.
    last_heartbeat: Duration,
    version: Option<u64>,
    decision: Decision,
    /// The version of the run state when the lease was last renewed. An older decision is outdated.
    min_version: u64,
    /// The newest epoch that any decision named.
    newest_epoch: Epoch,
    /// The epoch of the workers that may be running.
    running: Option<Epoch>,
    /// Workers of this epoch and of earlier ones were stopped; the agent never starts them again.
    stopped: Epoch,
}

impl LeaseTracker {
    /// The tracker of an agent that has not joined yet.
    pub fn new(lease: Duration) -> LeaseTracker {
        LeaseTracker {
            lease,
            valid_until: None,
            last_heartbeat: Duration::ZERO,
            version: None,
            decision: joining(),
            min_version: 0,
            newest_epoch: Epoch(0),
            running: None,
            stopped: Epoch(0),
        }
    }

    /// Renews the lease: a heartbeat or a join that was sent at `sent` was acknowledged when the run state had this
    /// version.
    ///
    /// A decision of that version or a newer one is valid as long as the lease is: until then no other world is
    /// formed before this agent has stopped its workers.
    pub fn renew(&mut self, sent: Duration, version: u64) {
        self.min_version = self.min_version.max(version);
        let until = sent.saturating_add(self.lease - self.lease / 6);
        self.valid_until = self.valid_until.max(Some(until));
    }

    /// Takes a decision. Older decisions, which may arrive late or twice, change nothing.
    pub fn on_decision(&mut self, version: u64, decision: Decision) {
        if self.version.is_some_and(|newest| version < newest) {
            return;
        }
        self.version = Some(version);
        self.newest_epoch = self
            .newest_epoch
            .max(epoch_of(&decision).unwrap_or_default());
        self.decision = decision;
    }

    /// Takes the end of the run, which replaces every other decision.
    pub fn on_closed(&mut self, outcome: RunOutcome) {
        let version = self.version.unwrap_or(0).saturating_add(1);
        self.on_decision(version, Decision::Close(outcome));
    }

    /// Whether the run has ended.
    pub fn is_closed(&self) -> bool {
        matches!(self.decision, Decision::Close(_))
    }

    /// When the lease expires unless it is renewed. `None` before the first lease is granted.
    pub fn expires_at(&self) -> Option<Duration> {
        self.valid_until
    }

    /// The version of the run state that the newest decision is from.
    pub fn version(&self) -> Option<u64> {
        self.version
    }

    /// The newest epoch and version that this agent knows.
    pub fn watermark(&self) -> Watermark {
        Watermark {
            epoch: self.newest_epoch,
            version: self.version.unwrap_or(0),
        }
    }

    /// When an agent that receives no response gives up: `timeout` after its lease expired, or after it began to
    /// join.
    pub fn join_deadline(&self, timeout: Duration) -> Duration {
        self.valid_until.unwrap_or_default().saturating_add(timeout)
    }

    /// The agent sends a heartbeat.
    pub fn on_heartbeat(&mut self, now: Duration) {
        self.last_heartbeat = now;
    }

    /// Whether the agent has stopped sending heartbeats after it joined. Its rank is then free for others, so it must
    /// not rejoin until its loop runs again.
    pub fn is_stalled(&self, now: Duration) -> bool {
        self.valid_until.is_some() && now >= self.last_heartbeat.saturating_add(self.lease)
    }

    /// Whether workers may be running.
    pub fn may_run_workers(&self) -> bool {
        self.running.is_some()
    }

    /// The workers of an epoch, and of all earlier ones, have stopped.
    pub fn on_stopped(&mut self, epoch: Epoch) {
        self.stopped = self.stopped.max(epoch);
        self.running = self.running.filter(|&running| running > epoch);
    }

    /// What the agent must do now. When its lease has expired it kills its workers, even those that are stopping, and
    /// never starts workers of that epoch again, whatever it receives later.
    pub fn decide(&mut self, now: Duration) -> Decision {
        let is_valid = self.valid_until.is_some_and(|until| now < until);
        match (&self.decision, self.running) {
            (_, Some(epoch)) if !is_valid => {
                self.stopped = self.stopped.max(epoch);
                Decision::LeaseExpired { epoch }
            }
            (Decision::Run(assignment), _) if assignment.epoch <= self.stopped => {
                let epoch = assignment.epoch;
                Decision::LeaseExpired { epoch }
            }
            (Decision::Run(_), None) if !is_valid || self.version < Some(self.min_version) => {
                joining()
            }
            (Decision::Run(assignment), _) => {
                self.running = Some(assignment.epoch);
                self.decision.clone()
            }
            _ => self.decision.clone(),
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
        Decision::Wait { epoch, .. }
        | Decision::Standby { epoch }
        | Decision::LeaseExpired { epoch } => Some(*epoch),
        Decision::Run(assignment) => Some(assignment.epoch),
        Decision::Close(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Address, RankAssignment};

    const SECOND: Duration = Duration::from_secs(1);

    fn run(epoch: u64) -> Decision {
        Decision::Run(RankAssignment {
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
            hosts_store: true,
        })
    }

    fn runs(tracker: &mut LeaseTracker, seconds: u32) -> bool {
        matches!(tracker.decide(SECOND * seconds), Decision::Run(_))
    }

    #[test]
    fn a_lease_counts_from_when_the_acknowledged_request_was_sent() {
        let mut tracker = LeaseTracker::new(SECOND * 3);
        tracker.on_decision(1, run(1));
        assert!(!runs(&mut tracker, 0), "no lease was granted yet");
        let mut tracker = LeaseTracker::new(SECOND * 6);
        tracker.renew(SECOND, 0);
        tracker.on_decision(1, run(1));
        assert!(runs(&mut tracker, 5));
        assert!(
            !runs(&mut tracker, 6),
            "the agent trusts its lease for 5 s of 6"
        );
    }

    #[test]
    fn workers_of_an_expired_epoch_never_start_again() {
        let mut tracker = LeaseTracker::new(SECOND * 3);
        tracker.renew(SECOND, 0);
        tracker.on_decision(1, run(1));
        assert!(runs(&mut tracker, 2));
        assert!(!runs(&mut tracker, 5));
        tracker.renew(SECOND * 5, 0);
        tracker.on_decision(1, run(1));
        assert!(!runs(&mut tracker, 6));
        tracker.on_decision(3, run(2));
        assert!(runs(&mut tracker, 6));
    }

    #[test]
    fn split_brain_a_lease_that_expires_while_workers_stop_kills_them() {
        let mut tracker = LeaseTracker::new(SECOND * 3);
        tracker.renew(SECOND, 0);
        tracker.on_decision(1, run(1));
        assert!(runs(&mut tracker, 2));
        let wait = Decision::Wait {
            epoch: Epoch(1),
            reason: "scaling up".into(),
        };
        tracker.on_decision(2, wait.clone());
        assert_eq!(tracker.decide(SECOND * 3), wait);
        let expired = Decision::LeaseExpired { epoch: Epoch(1) };
        assert_eq!(tracker.decide(SECOND * 4), expired);
        tracker.on_stopped(Epoch(1));
        assert_eq!(tracker.decide(SECOND * 5), wait);
    }

    #[test]
    fn split_brain_a_decision_older_than_the_renewed_lease_starts_no_workers() {
        let mut tracker = LeaseTracker::new(SECOND * 3);
        tracker.renew(SECOND, 4);
        tracker.on_decision(3, run(1));
        assert!(!runs(&mut tracker, 2));
        tracker.on_decision(4, run(2));
        assert!(runs(&mut tracker, 2));
    }

    #[test]
    fn an_outdated_decision_changes_nothing() {
        let mut tracker = LeaseTracker::new(SECOND * 3);
        tracker.renew(SECOND, 0);
        tracker.on_decision(3, run(2));
        tracker.on_decision(1, run(1));
        assert_eq!(tracker.decide(SECOND), run(2));
    }
}
