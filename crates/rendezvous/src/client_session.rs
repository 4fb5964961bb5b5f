//! The agent's side of the server protocol, without I/O.

use std::collections::VecDeque;
use std::time::Duration;

use crate::{
    Decision, Epoch, Join, LeaseTracker, NodeInfo, Rejection, Report, Request, RequestKind,
    Response,
};

/// Responses to requests older than this many are ignored.
const MAX_PENDING: usize = 64;

/// The state machine of one agent that talks to a server.
#[derive(Debug)]
pub struct ClientSession {
    join: Join,
    tracker: LeaseTracker,
    has_joined: bool,
    /// The number of reports so far.
    reports: u64,
    /// The last report, until the server acknowledges it.
    unacked_report: Option<(Epoch, Report)>,
    last_id: u64,
    pending: VecDeque<Pending>,
}

/// A request that was not answered yet.
#[derive(Debug)]
struct Pending {
    id: u64,
    sent: Duration,
    kind: PendingKind,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum PendingKind {
    /// A join that carries the report of this number.
    Join(u64),
    Heartbeat,
    /// The report of this number.
    Report(u64),
}

impl ClientSession {
    /// The session of an agent that has sent nothing yet.
    pub fn new(join: Join) -> ClientSession {
        ClientSession {
            tracker: LeaseTracker::new(join.policy.lease),
            join,
            has_joined: false,
            reports: 0,
            unacked_report: None,
            last_id: 0,
            pending: VecDeque::new(),
        }
    }

    /// The agent's node.
    pub fn node_info(&self) -> &NodeInfo {
        &self.join.node_info
    }

    /// The agent's lease and its newest decision.
    pub fn tracker(&mut self) -> &mut LeaseTracker {
        &mut self.tracker
    }

    /// The connection broke. The agent must join again, because its last requests may be lost.
    pub fn on_disconnect(&mut self) {
        self.has_joined = false;
    }

    /// The requests to send now: a join or a heartbeat, and a report that was not acknowledged yet.
    pub fn poll_requests(&mut self, now: Duration) -> Vec<Request> {
        let expires_at = self.tracker.expires_at();
        if expires_at.is_none_or(|expires_at| now >= expires_at) {
            self.has_joined = false;
        }
        if !self.has_joined {
            self.join.watermark = self.join.watermark.max(self.tracker.watermark());
            let join = RequestKind::Join(Box::new(self.join.clone()));
            return vec![self.request(PendingKind::Join(self.reports), join, now)];
        }
        let known = self.tracker.version();
        let heartbeat = RequestKind::Heartbeat { known };
        let mut requests = vec![self.request(PendingKind::Heartbeat, heartbeat, now)];
        requests.extend(self.repeat_report(now));
        requests
    }

    /// Reports the state of the workers of an epoch. The session repeats the report until it is acknowledged.
    pub fn report(&mut self, epoch: Epoch, report: Report, now: Duration) -> Option<Request> {
        if report == Report::Stopped {
            self.tracker.on_stopped(epoch);
        }
        self.join.last_report = Some((epoch, report.clone()));
        self.unacked_report = Some((epoch, report));
        self.reports += 1;
        if !self.has_joined {
            return None; // the next join carries it
        }
        self.repeat_report(now)
    }

    /// Leaves the run.
    pub fn leave(&mut self, now: Duration) -> Request {
        self.request(PendingKind::Heartbeat, RequestKind::Leave, now)
    }

    /// Takes a response. Returns an error if the server rejected a join.
    pub fn handle_response(&mut self, response: Response) -> Result<(), Rejection> {
        match response {
            Response::Decision { version, decision } => self.tracker.on_decision(version, decision),
            Response::Ack { id, version } => self.handle_ack(id, version),
            Response::Rejected { id, rejection } => match (self.take_pending(id), rejection) {
                (_, Rejection::Closed(outcome)) => self.tracker.on_closed(outcome),
                (Some(_), Rejection::NoLease { .. }) => self.has_joined = false,
                (Some(pending), rejection) => match pending.kind {
                    PendingKind::Join(_) => return Err(rejection),
                    PendingKind::Report(report) => self.settle_report(report),
                    PendingKind::Heartbeat => {}
                },
                (None, _) => {}
            },
        }
        Ok(())
    }

    /// What the agent must do now.
    pub fn decide(&mut self, now: Duration) -> Decision {
        self.tracker.decide(now)
    }

    /// Whether the server acknowledged the last join, and the lease of that join has not expired.
    pub fn has_joined(&self) -> bool {
        self.has_joined
    }

    fn handle_ack(&mut self, id: u64, version: u64) {
        let Some(pending) = self.take_pending(id) else {
            return;
        };
        self.tracker.renew(pending.sent, version);
        match pending.kind {
            PendingKind::Join(report) => {
                self.has_joined = true;
                self.settle_report(report);
            }
            PendingKind::Report(report) => self.settle_report(report),
            PendingKind::Heartbeat => {}
        }
    }

    fn repeat_report(&mut self, now: Duration) -> Option<Request> {
        let (epoch, report) = self.unacked_report.clone()?;
        let report = RequestKind::Report { epoch, report };
        Some(self.request(PendingKind::Report(self.reports), report, now))
    }

    /// Stops repeating a report, unless there is a newer one.
    fn settle_report(&mut self, report: u64) {
        if report == self.reports {
            self.unacked_report = None;
        }
    }

    fn request(&mut self, pending: PendingKind, kind: RequestKind, now: Duration) -> Request {
        self.last_id += 1;
        self.pending.push_back(Pending {
            id: self.last_id,
            sent: now,
            kind: pending,
        });
        if self.pending.len() > MAX_PENDING {
            self.pending.pop_front();
        }
        Request {
            id: self.last_id,
            node: self.join.node_info.node.clone(),
            instance: self.join.node_info.instance,
            kind,
        }
    }

    fn take_pending(&mut self, id: u64) -> Option<Pending> {
        let at = self.pending.iter().position(|pending| pending.id == id)?;
        self.pending.remove(at)
    }
}
