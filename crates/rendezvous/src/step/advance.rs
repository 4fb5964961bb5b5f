//! The part of a step that follows from the state and the time alone: when a world is formed, invalidated or closed.

use std::time::Duration;

use super::{Agent, State};
use crate::world::form;
use crate::{Cause, NodeInfo, Phase, Policy, Reason, RunOutcome};

impl State {
    /// Forms, invalidates or closes the world if it is time.
    pub(super) fn advance(&mut self, now: Duration) -> Reason {
        let Some(policy) = self.run_state.policy.clone() else {
            return Reason::TooFewNodes { have: 0, need: 1 };
        };
        match self.run_state.phase.clone() {
            Phase::Closed(outcome) => Reason::Closed(outcome),
            Phase::Running => self.advance_running(&policy, now),
            Phase::Joining(cause) => self.advance_joining(&policy, cause, now),
        }
    }

    fn advance_running(&mut self, policy: &Policy, now: Duration) -> Reason {
        let epoch = self.run_state.epoch;
        let has_succeeded = |member: &NodeInfo| self.succeeded.contains(&member.node);
        if self.run_state.world.iter().all(has_succeeded) {
            return self.close(RunOutcome::Succeeded, now);
        }
        let standby = self.agents.len() - self.num_present();
        let has_room = self.run_state.world.len() < policy.max_nodes as usize;
        // Once a node has succeeded the run is about to end, so it no longer scales up.
        if standby == 0 || !has_room || !self.succeeded.is_empty() {
            self.last_call_ends = None;
            return Reason::Running { epoch, standby };
        }
        let ends = *self
            .last_call_ends
            .get_or_insert(now.saturating_add(policy.last_call_timeout));
        if now < ends {
            return Reason::Running { epoch, standby };
        }
        self.invalidate(Cause::ScaleUp, now);
        Reason::Invalidated {
            epoch,
            cause: Cause::ScaleUp,
        }
    }

    fn advance_joining(&mut self, policy: &Policy, cause: Cause, now: Duration) -> Reason {
        if now >= self.phase_since.saturating_add(policy.join_timeout) {
            let (have, need) = (self.readiness().0 as u32, policy.min_nodes);
            return self.close(RunOutcome::TimedOut { have, need }, now);
        }
        if let Some(reason) = self.blocked_on(policy, &cause, now) {
            return reason;
        }
        // If a node was lost as well, its loss is taken for the cause of the failure, which then costs no restart.
        if let Cause::Failed {
            node,
            message,
            is_final,
        } = cause
            && self.is_complete()
        {
            let restarts = self.run_state.restarts;
            if is_final || restarts >= policy.max_restarts {
                let outcome = RunOutcome::Failed {
                    node,
                    message,
                    restarts,
                };
                return self.close(outcome, now);
            }
            self.run_state.restarts += 1;
        }
        self.form(policy, now)
    }

    /// Why the next world cannot be formed yet.
    fn blocked_on(&mut self, policy: &Policy, cause: &Cause, now: Duration) -> Option<Reason> {
        let (have, stopping) = self.readiness();
        if have + stopping < policy.min_nodes as usize {
            self.last_call_ends = None;
            let need = policy.min_nodes;
            return Some(Reason::TooFewNodes { have, need });
        }
        let timeout = match cause {
            Cause::Start => policy.last_call_timeout,
            _ => policy.rejoin_timeout,
        };
        let ends = *self
            .last_call_ends
            .get_or_insert(now.saturating_add(timeout));
        if stopping > 0 {
            return Some(Reason::Stopping { left: stopping });
        }
        let most = policy.max_nodes;
        // If no member is missing there is no node to wait for.
        let is_complete = match cause {
            Cause::Start => false,
            Cause::ScaleUp => true,
            _ => self.is_complete(),
        };
        let must_wait = have < most as usize && !is_complete && now < ends;
        must_wait.then_some(Reason::LastCall { have, most, ends })
    }

    fn form(&mut self, policy: &Policy, now: Duration) -> Reason {
        let mut ready: Vec<&Agent> = self
            .agents
            .values()
            .filter(|agent| agent.is_ready(self.run_state.epoch))
            .collect();
        ready.sort_by_key(|agent| agent.arrived);
        let candidates: Vec<&NodeInfo> = ready.iter().map(|agent| &agent.node_info).collect();
        let world = form(
            &self.run_state.world,
            self.run_state.store_host,
            &candidates,
            policy.max_nodes as usize,
        );
        let epoch = self.run_state.epoch.max(self.min_epoch).next();
        self.run_state.epoch = epoch;
        self.run_state.world = world.members;
        self.run_state.store_host = world.store_host;
        for agent in self.agents.values_mut() {
            agent.is_in_world = false;
        }
        for member in &self.run_state.world {
            if let Some(agent) = self.agents.get_mut(&member.node) {
                agent.is_in_world = true;
            }
        }
        self.enter(Phase::Running, now);
        let nodes = self.run_state.world.len();
        Reason::Formed { epoch, nodes }
    }

    fn close(&mut self, outcome: RunOutcome, now: Duration) -> Reason {
        self.enter(Phase::Closed(outcome.clone()), now);
        Reason::Closed(outcome)
    }
}
