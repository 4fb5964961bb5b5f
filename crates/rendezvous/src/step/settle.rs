//! When it is time for a new world, or for the end: what follows from a state and the time alone.

use std::time::Duration;

use super::{Agent, State};
use crate::world::form;
use crate::{Advert, Cause, Close, Phase, Policy, Reason};

impl State {
    /// Forms or closes the world if it is time.
    pub(super) fn settle(&mut self, now: Duration) -> Reason {
        let Some(policy) = self.record.policy.clone() else {
            return Reason::TooFew { have: 0, need: 1 };
        };
        match self.record.phase.clone() {
            Phase::Closed(how) => Reason::Closed(how),
            Phase::Running => self.settle_running(&policy, now),
            Phase::Gathering(cause) => self.settle_gathering(&policy, cause, now),
        }
    }

    fn settle_running(&mut self, policy: &Policy, now: Duration) -> Reason {
        let epoch = self.record.epoch;
        let is_done = |member: &Advert| self.done.contains(&member.node);
        if self.record.world.iter().all(is_done) {
            return self.close(Close::Succeeded, now);
        }
        let parked = self.agents.len() - self.present();
        let room = self.record.world.len() < policy.max_nodes as usize;
        // A world of which a part has finished is about to end: nobody is let in.
        if parked == 0 || !room || !self.done.is_empty() {
            self.last_call = None;
            return Reason::Running { epoch, parked };
        }
        let ends = *self
            .last_call
            .get_or_insert(now.saturating_add(policy.last_call));
        if now < ends {
            return Reason::Running { epoch, parked };
        }
        self.break_up(Cause::Grows, now);
        Reason::Broke {
            epoch,
            cause: Cause::Grows,
        }
    }

    fn settle_gathering(&mut self, policy: &Policy, cause: Cause, now: Duration) -> Reason {
        if now >= self.since.saturating_add(policy.join_timeout) {
            let (have, need) = (self.readiness().0 as u32, policy.min_nodes);
            return self.close(Close::TimedOut { have, need }, now);
        }
        if let Some(reason) = self.waits_for(policy, &cause, now) {
            return reason;
        }
        // A failure beside which a node was lost is taken for that node's.
        if let Cause::Failed { node, message } = cause
            && self.is_whole()
        {
            let restarts = self.record.restarts;
            if restarts >= policy.max_restarts {
                let how = Close::Failed {
                    node,
                    message,
                    restarts,
                };
                return self.close(how, now);
            }
            self.record.restarts += 1;
        }
        self.form(policy, now)
    }

    /// Why the next world cannot be formed yet.
    fn waits_for(&mut self, policy: &Policy, cause: &Cause, now: Duration) -> Option<Reason> {
        let (have, stopping) = self.readiness();
        if have + stopping < policy.min_nodes as usize {
            self.last_call = None;
            let need = policy.min_nodes;
            return Some(Reason::TooFew { have, need });
        }
        let window = match cause {
            Cause::Start => policy.last_call,
            _ => policy.regather,
        };
        let ends = *self.last_call.get_or_insert(now.saturating_add(window));
        if stopping > 0 {
            return Some(Reason::Stopping { left: stopping });
        }
        let most = policy.max_nodes;
        // Where nobody is missing there is nobody to wait for.
        let nobody_is_missing = match cause {
            Cause::Start => false,
            Cause::Grows => true,
            _ => self.is_whole(),
        };
        let waits = have < most as usize && !nobody_is_missing && now < ends;
        waits.then_some(Reason::LastCall { have, most, ends })
    }

    fn form(&mut self, policy: &Policy, now: Duration) -> Reason {
        let mut ready: Vec<&Agent> = self
            .agents
            .values()
            .filter(|agent| agent.is_ready(self.record.epoch))
            .collect();
        ready.sort_by_key(|agent| agent.arrived);
        let candidates: Vec<&Advert> = ready.iter().map(|agent| &agent.advert).collect();
        let world = form(
            &self.record.world,
            self.record.holder,
            &candidates,
            policy.max_nodes as usize,
        );
        let epoch = self.record.epoch.max(self.floor).next();
        self.record.epoch = epoch;
        self.record.world = world.members;
        self.record.holder = world.holder;
        for agent in self.agents.values_mut() {
            agent.is_member = false;
        }
        for member in &self.record.world {
            if let Some(agent) = self.agents.get_mut(&member.node) {
                agent.is_member = true;
            }
        }
        self.enter(Phase::Running, now);
        let nodes = self.record.world.len();
        Reason::Formed { epoch, nodes }
    }

    fn close(&mut self, how: Close, now: Duration) -> Reason {
        self.enter(Phase::Closed(how.clone()), now);
        Reason::Closed(how)
    }
}
