//! The decision function: state, event and time in; state, actions and reason out.
//!
//! Nothing here waits, sends or reads a clock. `now` is the time since a fixed moment on the decider's own monotonic
//! clock.

mod advance;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::{
    Cause, Decision, Epoch, Event, Join, NodeInfo, Phase, Reason, Rejection, Report, RunState,
};

const MAX_AGENTS: usize = 16_384;

/// What the decider must do after a step.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Action {
    /// Make the run state durable, then send every member its decision.
    Publish,
    /// Acknowledge the event to the agent that caused it.
    Accept,
    /// Reject the event of the agent that caused it.
    Reject(Rejection),
}

/// Whose clock expires leases.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LeaseClock {
    /// The decider's own: leases expire by the time given to [`step`].
    Local,
    /// That of a lease service, such as etcd: leases expire by [`Event::Lost`].
    External,
}

/// Everything that a decision depends on: the durable run state, and what the decider knows of the agents.
#[derive(Clone, Debug)]
pub struct State {
    run_state: RunState,
    lease_clock: LeaseClock,
    /// The agents that hold a lease, by node.
    agents: BTreeMap<String, Agent>,
    /// The number of agents admitted so far. It orders them, because earlier agents take precedence.
    arrivals: u64,
    /// The next epoch must be greater than this one.
    min_epoch: Epoch,
    /// The time of the last event.
    now: Duration,
    /// When the current phase began.
    phase_since: Duration,
    /// When the wait for more nodes ends, if there is one.
    last_call_ends: Option<Duration>,
    /// The members of the running world whose workers have succeeded.
    succeeded: BTreeSet<String>,
}

#[derive(Clone, Debug)]
struct Agent {
    node_info: NodeInfo,
    expires: Duration,
    arrived: u64,
    /// The agent is known only from the run state. Until it joins again its last report is unknown.
    is_unconfirmed: bool,
    /// Whether the agent has a rank in the newest world.
    is_in_world: bool,
    /// The newest epoch whose workers the agent has stopped.
    stopped: Option<Epoch>,
}

/// The result of an event.
#[derive(Clone, Debug)]
pub struct Step {
    /// The new state.
    pub state: State,
    /// What the decider must do, in this order.
    pub actions: Vec<Action>,
    /// Why the run is in its current phase.
    pub reason: Reason,
}

/// Decides what follows from an event at a time.
///
/// Leases that have expired by `now` end first, so a late request is rejected even if the decider did not run in
/// between. Then the event is applied, and then the run advances: a world is formed, invalidated or closed if it is
/// time.
pub fn step(mut state: State, event: Event, now: Duration) -> Step {
    let version = state.run_state.version;
    let now = now.max(state.now);
    state.now = now;
    state.expire_leases(now);
    let needs_response = !matches!(event, Event::Tick | Event::Lost { .. });
    let applied = state.apply(event, now);
    let mut reason = state.advance(now);
    let mut actions = Vec::new();
    if state.run_state.version != version {
        actions.push(Action::Publish);
    }
    match applied {
        Ok(()) if needs_response => actions.push(Action::Accept),
        Ok(()) => {}
        Err(rejection) => {
            actions.push(Action::Reject(rejection.clone()));
            reason = Reason::Rejected(rejection);
        }
    }
    Step {
        state,
        actions,
        reason,
    }
}

impl State {
    /// The state in which a decider starts, given the newest run state. The members of its world count as present for
    /// one lease, in which they must join again.
    pub fn resume(run_state: RunState, lease_clock: LeaseClock, now: Duration) -> State {
        let world = run_state.world.clone();
        let is_closed = matches!(run_state.phase, Phase::Closed(_));
        let mut state = State {
            min_epoch: run_state.epoch,
            run_state,
            lease_clock,
            agents: BTreeMap::new(),
            arrivals: 0,
            now,
            phase_since: now,
            last_call_ends: None,
            succeeded: BTreeSet::new(),
        };
        for member in world.into_iter().filter(|_| !is_closed) {
            state.admit(member, now);
        }
        for agent in state.agents.values_mut() {
            agent.is_unconfirmed = true;
        }
        state
    }

    /// The newest run state.
    pub fn run_state(&self) -> &RunState {
        &self.run_state
    }

    /// What an agent must do now.
    pub fn decision_for(&self, agent: &NodeInfo) -> Decision {
        self.run_state.decision_for(agent)
    }

    /// The agents that hold a lease, with or without a rank in the world.
    pub fn members(&self) -> impl Iterator<Item = &NodeInfo> {
        self.agents.values().map(|agent| &agent.node_info)
    }

    /// The agent of a node, if it holds a lease.
    pub fn member(&self, node: &str) -> Option<&NodeInfo> {
        self.agents.get(node).map(|agent| &agent.node_info)
    }

    /// When to step next if there is no event before.
    pub fn wake_at(&self) -> Option<Duration> {
        let policy = self.run_state.policy.as_ref()?;
        let is_joining = match self.run_state.phase {
            Phase::Closed(_) => return None,
            Phase::Joining(_) => true,
            Phase::Running => false,
        };
        let join_deadline =
            is_joining.then(|| self.phase_since.saturating_add(policy.join_timeout));
        let leases = self.agents.values().map(|agent| agent.expires);
        let timers = [self.last_call_ends, join_deadline];
        // A timer in the past has had its effect, or waits for an event.
        let is_pending = |time: &Duration| *time > self.now && *time < Duration::MAX;
        leases
            .chain(timers.into_iter().flatten())
            .filter(is_pending)
            .min()
    }

    fn expire_leases(&mut self, now: Duration) {
        let expired: Vec<String> = self
            .agents
            .values()
            .filter(|agent| agent.expires <= now)
            .map(|agent| agent.node_info.node.clone())
            .collect();
        for node in expired {
            self.remove_member(&node, Cause::Lost { node: node.clone() }, now);
        }
    }

    fn apply(&mut self, event: Event, now: Duration) -> Result<(), Rejection> {
        if let Phase::Closed(outcome) = &self.run_state.phase
            && matches!(event, Event::Join(_) | Event::Report { .. })
        {
            return Err(Rejection::Closed(outcome.clone()));
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
                self.lease_of(&node, instance)?;
                self.report(&node, epoch, report, now)?;
                self.renew(&node, instance, now)
            }
            Event::Leave { node, instance } => {
                self.lease_of(&node, instance)?;
                self.remove_member(&node, Cause::Left { node: node.clone() }, now);
                Ok(())
            }
            Event::Lost { node } => {
                self.remove_member(&node, Cause::Lost { node: node.clone() }, now);
                Ok(())
            }
            Event::Tick => Ok(()),
        }
    }

    fn join(&mut self, join: Join, now: Duration) -> Result<(), Rejection> {
        self.check_join(&join)?;
        let Join {
            policy,
            node_info,
            watermark,
            last_report,
            ..
        } = join;
        if self.run_state.policy.is_none() {
            self.run_state.policy = Some(policy);
            self.phase_since = now;
        }
        self.min_epoch = self.min_epoch.max(watermark.epoch);
        self.run_state.version = self.run_state.version.max(watermark.version);
        let node = node_info.node.clone();
        let is_new = !self.agents.contains_key(&node);
        if let Some(known) = self.agents.get_mut(&node) {
            (known.node_info, known.is_unconfirmed) = (node_info.clone(), false);
        } else {
            self.admit(node_info.clone(), now);
        }
        if let Some((epoch, report)) = last_report {
            // A rejected report is about an old world, and no longer matters.
            let _ = self.report(&node, epoch, report, now);
        }
        let renewed = self.renew(&node, node_info.instance, now);
        if renewed.is_err() && is_new {
            self.agents.remove(&node);
        }
        renewed
    }

    fn check_join(&self, join: &Join) -> Result<(), Rejection> {
        join.check(&self.run_state)?;
        let joining = &join.node_info;
        let same_rank =
            |other: &&NodeInfo| other.node_rank == joining.node_rank && other.node != joining.node;
        if let Some(rank) = joining.node_rank
            && let Some(other) = self.members().find(same_rank)
        {
            return Err(Rejection::RankTaken {
                rank,
                by: other.node.clone(),
            });
        }
        match self.agents.get(&joining.node) {
            Some(known) if !known.node_info.is(joining) => Err(Rejection::NameTaken {
                node: joining.node.clone(),
            }),
            None if self.agents.len() >= MAX_AGENTS => {
                Err(Rejection::TooManyNodes { max: MAX_AGENTS })
            }
            _ => Ok(()),
        }
    }

    fn admit(&mut self, node_info: NodeInfo, now: Duration) {
        self.arrivals += 1;
        let agent = Agent {
            expires: self.lease_from(now),
            arrived: self.arrivals,
            is_unconfirmed: false,
            is_in_world: self.run_state.rank_of(&node_info).is_some(),
            stopped: None,
            node_info,
        };
        self.agents.insert(agent.node_info.node.clone(), agent);
    }

    fn lease_from(&self, now: Duration) -> Duration {
        match (self.lease_clock, &self.run_state.policy) {
            (LeaseClock::Local, Some(policy)) => now.saturating_add(policy.lease),
            _ => Duration::MAX,
        }
    }

    /// The agent that holds the lease of a node. Events of any other instance are rejected.
    fn lease_of(&mut self, node: &str, instance: u64) -> Result<&mut Agent, Rejection> {
        let holds_lease =
            |agent: &&mut Agent| agent.node_info.instance == instance && !agent.is_unconfirmed;
        let agent = self.agents.get_mut(node).filter(holds_lease);
        agent.ok_or_else(|| Rejection::NoLease {
            node: node.to_owned(),
        })
    }

    /// Renews a lease, unless the agent did not stop its workers in time. The others then wait until that lease
    /// expires: the agent notices this too, and has killed its workers by then.
    fn renew(&mut self, node: &str, instance: u64, now: Duration) -> Result<(), Rejection> {
        let expires = self.lease_from(now);
        let epoch = self.run_state.epoch;
        let is_past_stop_deadline = self.is_past_stop_deadline(now);
        let agent = self.lease_of(node, instance)?;
        if is_past_stop_deadline && !agent.is_ready(epoch) {
            return Err(Rejection::NoLease {
                node: node.to_owned(),
            });
        }
        agent.expires = expires;
        Ok(())
    }

    /// Whether all workers of the invalidated world should have stopped by now.
    fn is_past_stop_deadline(&self, now: Duration) -> bool {
        match (&self.run_state.phase, &self.run_state.policy) {
            (Phase::Joining(_), Some(policy)) => {
                now >= self.phase_since.saturating_add(policy.stop_timeout)
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
    ) -> Result<(), Rejection> {
        report.check()?;
        let current = self.run_state.epoch;
        if epoch != current || epoch == Epoch(0) {
            return Err(Rejection::StaleEpoch {
                given: epoch,
                current,
            });
        }
        let Some(agent) = self.agents.get_mut(node) else {
            return Err(Rejection::NoLease {
                node: node.to_owned(),
            });
        };
        if !agent.is_in_world {
            return Err(Rejection::NotInWorld {
                node: node.to_owned(),
                epoch,
            });
        }
        let node = node.to_owned();
        let is_running = self.run_state.phase == Phase::Running;
        match report {
            Report::Succeeded if is_running => {
                self.succeeded.insert(node);
            }
            Report::Failed { message, is_final } if is_running => {
                let cause = Cause::Failed {
                    node,
                    message,
                    is_final,
                };
                self.invalidate(cause, now)
            }
            Report::Stopped => {
                agent.stopped = Some(epoch);
                if is_running {
                    self.invalidate(Cause::Lost { node }, now);
                }
            }
            // The world is already invalidated, and its first cause counts.
            Report::Succeeded | Report::Failed { .. } => {}
        }
        Ok(())
    }

    /// Removes an agent, and invalidates the world if it needs that agent.
    fn remove_member(&mut self, node: &str, cause: Cause, now: Duration) {
        let Some(agent) = self.agents.remove(node) else {
            return;
        };
        let is_needed = agent.is_in_world && !self.succeeded.contains(node);
        if self.run_state.phase == Phase::Running && is_needed {
            self.invalidate(cause, now);
        }
    }

    fn invalidate(&mut self, cause: Cause, now: Duration) {
        self.enter(Phase::Joining(cause), now);
    }

    fn enter(&mut self, phase: Phase, now: Duration) {
        self.run_state.phase = phase;
        self.run_state.version += 1;
        self.phase_since = now;
        self.last_call_ends = None;
        self.succeeded.clear();
    }

    /// The number of members of the newest world that hold a lease.
    fn num_present(&self) -> usize {
        let agents = self.agents.values();
        agents.filter(|agent| agent.is_in_world).count()
    }

    /// Whether all members of the newest world hold a lease.
    fn is_complete(&self) -> bool {
        self.num_present() == self.run_state.world.len()
    }

    /// The number of agents that can enter the next world now, and of those that have yet to stop their workers.
    fn readiness(&self) -> (usize, usize) {
        let ready = self
            .agents
            .values()
            .filter(|agent| agent.is_ready(self.run_state.epoch))
            .count();
        (ready, self.agents.len() - ready)
    }
}

impl Agent {
    /// Whether the agent has no workers: it reported so, or was not in the last world.
    fn is_ready(&self, last: Epoch) -> bool {
        !self.is_in_world || self.stopped == Some(last)
    }
}
