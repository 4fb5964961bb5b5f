//! The decision: state, event and time in; state, what to do, and why out.
//!
//! Nothing here waits, sends or looks at a clock. `now` is the time since some fixed moment on the clock of
//! whoever decides, and only that clock; it never goes back.

mod settle;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::{Advert, Cause, Decision, Epoch, Event, Join, Phase, Reason, Record, Refusal, Report};

const MOST_AGENTS: usize = 16_384;

/// Something to do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Action {
    /// Make the record durable, then tell every agent what it means for it.
    Publish,
    /// Tell the agent whose event this was that it was heard.
    Accept,
    /// Tell it that it was not listened to.
    Refuse(Refusal),
}

/// Who says when a lease is over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Leases {
    /// This state, by the time given to [`step`].
    Counted,
    /// Somebody else, by [`Event::Lost`].
    Watched,
}

/// All that a decision depends on: the record, and what is known of the agents.
#[derive(Clone, Debug)]
pub struct State {
    record: Record,
    leases: Leases,
    agents: BTreeMap<String, Agent>,
    /// Numbers arrivals, because who came first is served first.
    arrivals: u64,
    /// No epoch up to this one may be used.
    floor: Epoch,
    /// When the last event was.
    at: Duration,
    /// When this phase began.
    since: Duration,
    last_call: Option<Duration>,
    /// Members of the running world whose workers have succeeded.
    done: BTreeSet<String>,
}

#[derive(Clone, Debug)]
struct Agent {
    advert: Advert,
    expires: Duration,
    arrived: u64,
    /// It is believed to be there because a record says so, and has not said so itself. Until it does, what
    /// it said before is not known here.
    is_presumed: bool,
    /// Whether it is in the newest world.
    is_member: bool,
    /// The newest epoch of which it has no workers any more.
    stopped: Option<Epoch>,
}

/// What came of an event.
#[derive(Clone, Debug)]
pub struct Step {
    /// The new state.
    pub state: State,
    /// What is to be done, in this order.
    pub actions: Vec<Action>,
    /// Why things are as they are.
    pub reason: Reason,
}

/// Decides what follows from an event at a time.
///
/// Leases that are over by `now` end first, so whoever comes too late is refused even if nobody looked in
/// between. Then the event counts, then the world is formed or closed if it is time.
pub fn step(mut state: State, event: Event, now: Duration) -> Step {
    let before = state.record.version;
    let now = now.max(state.at);
    state.at = now;
    state.expire(now);
    let heard = !matches!(event, Event::Tick | Event::Lost { .. });
    let answer = state.take(event, now);
    let mut reason = state.settle(now);
    let mut actions = Vec::new();
    if state.record.version != before {
        actions.push(Action::Publish);
    }
    match answer {
        Ok(()) if heard => actions.push(Action::Accept),
        Ok(()) => {}
        Err(refusal) => {
            actions.push(Action::Refuse(refusal.clone()));
            reason = Reason::Refused(refusal);
        }
    }
    Step {
        state,
        actions,
        reason,
    }
}

impl State {
    /// The state from which a decider starts, given the newest record. The members of its world are believed
    /// to be there for one lease, in which they have to join again.
    pub fn resume(record: Record, leases: Leases, now: Duration) -> State {
        let world = record.world.clone();
        let over = matches!(record.phase, Phase::Closed(_));
        let mut state = State {
            floor: record.epoch,
            record,
            leases,
            agents: BTreeMap::new(),
            arrivals: 0,
            at: now,
            since: now,
            last_call: None,
            done: BTreeSet::new(),
        };
        for advert in world.into_iter().filter(|_| !over) {
            state.admit(advert, now);
        }
        for agent in state.agents.values_mut() {
            agent.is_presumed = true;
        }
        state
    }

    /// The record, newest version.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// What an agent is to do now.
    pub fn decision_for(&self, agent: &Advert) -> Decision {
        self.record.decision_for(agent)
    }

    /// Who is there, with or without a place.
    pub fn attending(&self) -> impl Iterator<Item = &Advert> {
        self.agents.values().map(|agent| &agent.advert)
    }

    /// The agent of a node, if it is there.
    pub fn agent(&self, node: &str) -> Option<&Advert> {
        self.agents.get(node).map(|agent| &agent.advert)
    }

    /// When something may have to be decided though nothing happens.
    pub fn wake_at(&self) -> Option<Duration> {
        let policy = self.record.policy.as_ref()?;
        let gathering = match self.record.phase {
            Phase::Closed(_) => return None,
            Phase::Gathering(_) => true,
            Phase::Running => false,
        };
        let later = |wait: Duration| gathering.then(|| self.since.saturating_add(wait));
        let leases = self.agents.values().map(|agent| agent.expires);
        let timers = [self.last_call, later(policy.join_timeout)];
        // A timer that has passed has had its effect, or waits for something else.
        let still = |time: &Duration| *time > self.at && *time < Duration::MAX;
        leases
            .chain(timers.into_iter().flatten())
            .filter(still)
            .min()
    }

    fn expire(&mut self, now: Duration) {
        let over = |agent: &&Agent| agent.expires <= now;
        let lost: Vec<String> = self
            .agents
            .values()
            .filter(over)
            .map(|agent| agent.advert.node.clone())
            .collect();
        for node in lost {
            self.lose(&node, Cause::Lost { node: node.clone() }, now);
        }
    }

    fn take(&mut self, event: Event, now: Duration) -> Result<(), Refusal> {
        if let Phase::Closed(how) = &self.record.phase
            && !matches!(
                event,
                Event::Tick | Event::Lost { .. } | Event::Leave { .. } | Event::Heartbeat { .. }
            )
        {
            return Err(Refusal::Closed(how.clone()));
        }
        match event {
            Event::Join(join) => self.join(*join, now),
            Event::Heartbeat { node, instance } => self.renew(&node, instance, now),
            Event::Report {
                node,
                instance,
                epoch,
                report,
            } => {
                self.holder(&node, instance)?;
                self.report(&node, epoch, report, now)?;
                self.renew(&node, instance, now)
            }
            Event::Leave { node, instance } => {
                self.holder(&node, instance)?;
                self.lose(&node, Cause::Left { node: node.clone() }, now);
                Ok(())
            }
            Event::Lost { node } => {
                self.lose(&node, Cause::Lost { node: node.clone() }, now);
                Ok(())
            }
            Event::Tick => Ok(()),
        }
    }

    fn join(&mut self, join: Join, now: Duration) -> Result<(), Refusal> {
        self.check_join(&join)?;
        let Join {
            policy,
            advert,
            seen,
            said,
            ..
        } = join;
        if self.record.policy.is_none() {
            self.record.policy = Some(policy);
            self.since = now;
        }
        self.floor = self.floor.max(seen.epoch);
        self.record.version = self.record.version.max(seen.version);
        let node = advert.node.clone();
        let is_new = !self.agents.contains_key(&node);
        if let Some(known) = self.agents.get_mut(&node) {
            (known.advert, known.is_presumed) = (advert.clone(), false);
        } else {
            self.admit(advert.clone(), now);
        }
        if let Some((epoch, report)) = said {
            // If it is refused its world is long over: then there is nothing to say any more.
            let _ = self.report(&node, epoch, report, now);
        }
        let renewed = self.renew(&node, advert.instance, now);
        if renewed.is_err() && is_new {
            self.agents.remove(&node);
        }
        renewed
    }

    fn check_join(&self, join: &Join) -> Result<(), Refusal> {
        join.check(&self.record)?;
        let advert = &join.advert;
        let same_rank =
            |other: &&Advert| other.node_rank == advert.node_rank && other.node != advert.node;
        if let Some(rank) = advert.node_rank
            && let Some(other) = self.attending().find(same_rank)
        {
            return Err(Refusal::RankTaken {
                rank,
                by: other.node.clone(),
            });
        }
        match self.agents.get(&advert.node) {
            Some(known) if !known.advert.is(advert) => Err(Refusal::NameTaken {
                node: advert.node.clone(),
            }),
            None if self.agents.len() >= MOST_AGENTS => Err(Refusal::TooMany { most: MOST_AGENTS }),
            _ => Ok(()),
        }
    }

    fn admit(&mut self, advert: Advert, now: Duration) {
        self.arrivals += 1;
        let agent = Agent {
            expires: self.lease_from(now),
            arrived: self.arrivals,
            is_presumed: false,
            is_member: self.record.rank_of(&advert).is_some(),
            stopped: None,
            advert,
        };
        self.agents.insert(agent.advert.node.clone(), agent);
    }

    fn lease_from(&self, now: Duration) -> Duration {
        match (self.leases, &self.record.policy) {
            (Leases::Counted, Some(policy)) => now.saturating_add(policy.lease),
            _ => Duration::MAX,
        }
    }

    /// Only the agent that holds the lease is listened to.
    fn holder(&mut self, node: &str, instance: u64) -> Result<&mut Agent, Refusal> {
        let holds = |agent: &&mut Agent| agent.advert.instance == instance && !agent.is_presumed;
        let agent = self.agents.get_mut(node).filter(holds);
        agent.ok_or_else(|| Refusal::NoLease {
            node: node.to_owned(),
        })
    }

    /// Who does not stop its workers in time is not renewed any more. The others wait until its lease is over: by
    /// then it knows that too, and has killed them.
    fn renew(&mut self, node: &str, instance: u64, now: Duration) -> Result<(), Refusal> {
        let expires = self.lease_from(now);
        let epoch = self.record.epoch;
        let is_late = self.is_late(now);
        let agent = self.holder(node, instance)?;
        if is_late && !agent.is_ready(epoch) {
            return Err(Refusal::NoLease {
                node: node.to_owned(),
            });
        }
        agent.expires = expires;
        Ok(())
    }

    /// Whether all workers of the broken world should have been stopped by now.
    fn is_late(&self, now: Duration) -> bool {
        match (&self.record.phase, &self.record.policy) {
            (Phase::Gathering(_), Some(policy)) => {
                now >= self.since.saturating_add(policy.stop_within)
            }
            _ => false,
        }
    }

    fn report(
        &mut self,
        node: &str,
        epoch: Epoch,
        report: Report,
        now: Duration,
    ) -> Result<(), Refusal> {
        report.check()?;
        let current = self.record.epoch;
        if epoch != current || epoch == Epoch(0) {
            return Err(Refusal::StaleEpoch {
                given: epoch,
                current,
            });
        }
        let Some(agent) = self.agents.get_mut(node) else {
            return Err(Refusal::NoLease {
                node: node.to_owned(),
            });
        };
        if !agent.is_member {
            return Err(Refusal::NotAMember {
                node: node.to_owned(),
                epoch,
            });
        }
        let node = node.to_owned();
        let running = self.record.phase == Phase::Running;
        match report {
            Report::Succeeded if running => {
                self.done.insert(node);
            }
            Report::Failed { message } if running => {
                self.break_up(Cause::Failed { node, message }, now)
            }
            Report::Stopped => {
                agent.stopped = Some(epoch);
                if running {
                    self.break_up(Cause::Lost { node }, now);
                }
            }
            // Its world is broken already, for whatever came first.
            Report::Succeeded | Report::Failed { .. } => {}
        }
        Ok(())
    }

    /// Forgets an agent, and breaks the world that cannot do without it.
    fn lose(&mut self, node: &str, cause: Cause, now: Duration) {
        let Some(agent) = self.agents.remove(node) else {
            return;
        };
        let needed = agent.is_member && !self.done.contains(node);
        if self.record.phase == Phase::Running && needed {
            self.break_up(cause, now);
        }
    }

    fn break_up(&mut self, cause: Cause, now: Duration) {
        self.enter(Phase::Gathering(cause), now);
    }

    fn enter(&mut self, phase: Phase, now: Duration) {
        self.record.phase = phase;
        self.record.version += 1;
        self.since = now;
        self.last_call = None;
        self.done.clear();
    }

    /// How many members of the newest world are there.
    fn present(&self) -> usize {
        self.agents.values().filter(|agent| agent.is_member).count()
    }

    /// Whether all of them are.
    fn is_whole(&self) -> bool {
        self.present() == self.record.world.len()
    }

    /// How many could be in the next world now, and how many have yet to stop their workers.
    fn readiness(&self) -> (usize, usize) {
        let ready = self
            .agents
            .values()
            .filter(|agent| agent.is_ready(self.record.epoch))
            .count();
        (ready, self.agents.len() - ready)
    }
}

impl Agent {
    /// An agent is ready when it has no workers: it said so, or was not in the last world.
    fn is_ready(&self, last: Epoch) -> bool {
        !self.is_member || self.stopped == Some(last)
    }
}
