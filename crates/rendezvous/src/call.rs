//! What an agent and a server say to each other, and an agent's half of it, without anything that sends.
//!
//! Every letter has a number, and every answer names the letter it answers. Letters may be lost, come twice or
//! in another order: what was not answered is said again with the next heartbeat, and what comes twice changes
//! nothing.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Advert, Attendance, Decision, Epoch, Event, Join, Refusal, Report};

/// Answers to older letters than this many are of no use.
const MOST_OPEN: usize = 64;

/// From an agent.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Letter {
    /// Its number.
    pub number: u64,
    /// Who writes.
    pub node: String,
    /// Which of those that had that name.
    pub instance: u64,
    /// What it says.
    pub say: Say,
}

/// What an agent says.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Say {
    /// It wants to be part of the run, or is back.
    Join(Box<Join>),
    /// It is there, and knows the decision of this record.
    Heartbeat {
        /// The record's version.
        known: Option<u64>,
    },
    /// How its workers are.
    Report {
        /// Of which world.
        epoch: Epoch,
        /// How.
        report: Report,
    },
    /// It goes.
    Leave,
}

/// From the server.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// The letter of this number was heard.
    Heard {
        /// The number.
        number: u64,
        /// The record's version then.
        version: u64,
    },
    /// The letter of this number was refused.
    Refused {
        /// The number.
        number: u64,
        /// Why.
        refusal: Refusal,
    },
    /// What to do from now on.
    Told {
        /// The version of the record that says so.
        version: u64,
        /// What.
        decision: Decision,
    },
}

impl Letter {
    /// What this letter is to the decision.
    pub fn into_event(self) -> Event {
        let Letter { node, instance, .. } = self;
        match self.say {
            Say::Join(join) => Event::Join(join),
            Say::Heartbeat { .. } => Event::Heartbeat { node, instance },
            Say::Report { epoch, report } => Event::Report {
                node,
                instance,
                epoch,
                report,
            },
            Say::Leave => Event::Leave { node, instance },
        }
    }
}

/// An agent's half of a conversation.
#[derive(Debug)]
pub struct Call {
    join: Join,
    attendance: Attendance,
    has_joined: bool,
    /// How many reports there were; the last one, if it was not answered yet.
    reports: u64,
    unheard: Option<(Epoch, Report)>,
    numbered: u64,
    open: VecDeque<Open>,
}

#[derive(Debug)]
struct Open {
    number: u64,
    sent: Duration,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    /// With this report, and those before it.
    Join(u64),
    Heartbeat,
    Report(u64),
}

impl Call {
    /// A conversation that has not begun.
    pub fn new(join: Join) -> Call {
        Call {
            attendance: Attendance::new(join.policy.lease),
            join,
            has_joined: false,
            reports: 0,
            unheard: None,
            numbered: 0,
            open: VecDeque::new(),
        }
    }

    /// Who speaks.
    pub fn advert(&self) -> &Advert {
        &self.join.advert
    }

    /// The connection broke: nothing that was said may have arrived.
    pub fn interrupted(&mut self) {
        self.has_joined = false;
    }

    /// What to say now: that one is there, or wants to be, and what was not heard yet.
    pub fn speak(&mut self, now: Duration) -> Vec<Letter> {
        if self
            .attendance
            .lapses_at()
            .is_none_or(|lapses| now >= lapses)
        {
            self.has_joined = false;
        }
        if !self.has_joined {
            self.join.seen = self.join.seen.max(self.attendance.seen());
            let join = Say::Join(Box::new(self.join.clone()));
            return vec![self.letter(Kind::Join(self.reports), join, now)];
        }
        let known = self.attendance.version();
        let mut letters = vec![self.letter(Kind::Heartbeat, Say::Heartbeat { known }, now)];
        letters.extend(self.repeat(now));
        letters
    }

    /// Says how the workers of an epoch are; repeated until it is heard.
    pub fn report(&mut self, epoch: Epoch, report: Report, now: Duration) -> Option<Letter> {
        if report == Report::Stopped {
            self.attendance.stopped(epoch);
        }
        self.join.said = Some((epoch, report.clone()));
        self.unheard = Some((epoch, report));
        self.reports += 1;
        if !self.has_joined {
            return None; // it is said when joining
        }
        self.repeat(now)
    }

    /// Says that one goes.
    pub fn leave(&mut self, now: Duration) -> Letter {
        self.letter(Kind::Heartbeat, Say::Leave, now)
    }

    /// Takes an answer; a refusal to join is returned.
    pub fn hear(&mut self, answer: Answer) -> Result<(), Refusal> {
        match answer {
            Answer::Told { version, decision } => self.attendance.told(version, decision),
            Answer::Heard { number, version } => {
                if let Some(open) = self.close(number) {
                    self.attendance.renewed(open.sent, version);
                    match open.kind {
                        Kind::Join(report) => {
                            self.has_joined = true;
                            self.heard_report(report);
                        }
                        Kind::Report(report) => self.heard_report(report),
                        Kind::Heartbeat => {}
                    }
                }
            }
            Answer::Refused { number, refusal } => match (self.close(number), refusal) {
                (_, Refusal::Closed(how)) => {
                    let newest = self.attendance.version().unwrap_or(0);
                    self.attendance
                        .told(newest.saturating_add(1), Decision::Close(how));
                }
                (Some(_), Refusal::NoLease { .. }) => self.has_joined = false,
                (Some(open), refusal) => match open.kind {
                    Kind::Join(_) => return Err(refusal),
                    Kind::Report(report) => self.heard_report(report),
                    Kind::Heartbeat => {}
                },
                (None, _) => {}
            },
        }
        Ok(())
    }

    /// What to do now.
    pub fn decide(&mut self, now: Duration) -> Decision {
        self.attendance.decide(now)
    }

    /// When [`Call::decide`] may say something else though nothing is heard.
    pub fn lapses_at(&self) -> Option<Duration> {
        self.attendance.lapses_at()
    }

    /// The agent asks for its lease to be kept.
    pub fn asked(&mut self, now: Duration) {
        self.attendance.asked(now);
    }

    /// Whether the agent asks for nothing any more.
    pub fn hangs(&self, now: Duration) -> bool {
        self.attendance.hangs(now)
    }

    /// When one who hears nothing more gives up.
    pub fn gives_up_at(&self) -> Duration {
        let patience = self.join.policy.join_timeout;
        self.attendance.gives_up_at(patience)
    }

    /// Whether the last join was heard, and the lease with it holds.
    pub fn has_joined(&self) -> bool {
        self.has_joined
    }

    fn repeat(&mut self, now: Duration) -> Option<Letter> {
        let (epoch, report) = self.unheard.clone()?;
        Some(self.letter(
            Kind::Report(self.reports),
            Say::Report { epoch, report },
            now,
        ))
    }

    fn heard_report(&mut self, report: u64) {
        if report == self.reports {
            self.unheard = None;
        }
    }

    fn letter(&mut self, kind: Kind, say: Say, now: Duration) -> Letter {
        self.numbered += 1;
        self.open.push_back(Open {
            number: self.numbered,
            sent: now,
            kind,
        });
        if self.open.len() > MOST_OPEN {
            self.open.pop_front();
        }
        Letter {
            number: self.numbered,
            node: self.join.advert.node.clone(),
            instance: self.join.advert.instance,
            say,
        }
    }

    fn close(&mut self, number: u64) -> Option<Open> {
        let at = self.open.iter().position(|open| open.number == number)?;
        self.open.remove(at)
    }
}
