//! Agents and one server, in virtual time, as state machines without I/O.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use trainyard_rendezvous::{
    Address, ClientSession, Coordinator, Decision, Epoch, Join, NodeInfo, Policy, Report, Request,
    Response, RunState, Watermark,
};

use super::faults::{Fault, Rng, faults};
use super::invariants::{InvariantChecker, Totals};

const FAULTS_END: Duration = Duration::from_secs(40);
/// The maximum delay, in ms, before an agent checks its lease; the agent trusts its lease for a sixth less.
const POLL: u64 = 300;
const SECOND: Duration = Duration::from_secs(1);

/// The maximum time from the last fault to a complete world: a lease until crashed agents are lost and their names
/// are free, and a few seconds to stop workers, join and learn of it.
fn bound(policy: &Policy) -> Duration {
    policy.lease + 6 * SECOND
}

pub fn simulate(seed: u64) -> Totals {
    Simulation::new(seed).run()
}

#[derive(Debug)]
enum SimEvent {
    Fault(Fault),
    ToServer(Request),
    ToAgent {
        agent: usize,
        instance: u64,
        response: Response,
    },
    /// An agent checks its decision.
    Poll(usize),
    Heartbeat(usize),
    /// An agent's workers have stopped.
    Stopped {
        agent: usize,
        instance: u64,
        epoch: Epoch,
    },
    ServerWakes,
    /// Workers try to commit a step.
    Steps,
}

struct Agent {
    session: ClientSession,
    is_up: bool,
    is_frozen: bool,
    running: Option<Epoch>,
    /// The agent is stopping the workers of this epoch, which commit no more steps.
    stopping: Option<Epoch>,
    /// The newest epoch for which the agent reported that its workers have stopped.
    reported: Epoch,
}

struct Simulation {
    seed: u64,
    rng: Rng,
    checker: InvariantChecker,
    policy: Policy,
    now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    events: BTreeMap<u64, SimEvent>,
    last_id: u64,
    partitions: BTreeMap<(usize, usize), u32>,
    agents: Vec<Agent>,
    server: Option<Coordinator>,
    server_frozen: bool,
    durable: RunState,
    down: BTreeMap<usize, u32>,
    frozen: BTreeMap<usize, u32>,
}

pub fn join(agent: usize, instance: u64, policy: &Policy) -> Join {
    let node = format!("n{agent}");
    let store = Address {
        host: node.clone(),
        port: 1,
    };
    let node_info = NodeInfo {
        node,
        instance,
        num_workers: 1,
        capabilities: BTreeSet::new(),
        node_rank: None,
        store,
    };
    Join {
        run: "job".into(),
        policy: policy.clone(),
        node_info,
        watermark: Watermark::default(),
        last_report: None,
    }
}

impl Simulation {
    fn new(seed: u64) -> Simulation {
        let mut rng = Rng::new(seed);
        let num_agents = 2 + rng.below(6) as usize;
        let min = 1 + rng.below(num_agents as u64) as u32;
        // Sometimes there are nodes on standby, sometimes there is room for more.
        let max = min + rng.below(4) as u32;
        let mut policy = Policy::new(min, max);
        policy.max_restarts = 1000;
        policy.last_call_timeout = 2 * SECOND;
        policy.stop_timeout = 3 * SECOND;
        let agents = (0..num_agents).map(|agent| Agent {
            session: ClientSession::new(join(agent, rng.next(), &policy)),
            is_up: true,
            is_frozen: false,
            running: None,
            stopping: None,
            reported: Epoch(0),
        });
        let agents: Vec<Agent> = agents.collect();
        let durable = RunState::new("job");
        let mut simulation = Simulation {
            seed,
            checker: InvariantChecker::new(seed),
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            last_id: 0,
            partitions: BTreeMap::new(),
            server: Some(Coordinator::resume(durable.clone(), Duration::ZERO)),
            server_frozen: false,
            durable,
            down: BTreeMap::new(),
            frozen: BTreeMap::new(),
            policy,
            agents,
            rng,
        };
        simulation.prepare();
        simulation
    }

    fn prepare(&mut self) {
        for (at, fault) in faults(&mut self.rng, self.agents.len(), FAULTS_END) {
            self.at(at, SimEvent::Fault(fault));
        }
        for agent in 0..self.agents.len() {
            let first = self.rng.millis(0, 2000);
            self.at(first, SimEvent::Heartbeat(agent));
            self.at(first, SimEvent::Poll(agent));
        }
        self.at(SECOND, SimEvent::Steps);
    }

    /// Runs until the world is complete again after the last fault; panics if that takes too long.
    fn run(mut self) -> Totals {
        let bound = FAULTS_END + bound(&self.policy);
        let mut complete_since = None;
        while let Some(Reverse((time, number))) = self.queue.pop() {
            self.now = time;
            let Some(event) = self.events.remove(&number) else {
                continue;
            };
            self.handle(event);
            if self.now < FAULTS_END {
                continue;
            }
            match (self.is_complete(), complete_since) {
                (true, None) => complete_since = Some(self.now),
                (false, Some(_)) => complete_since = None,
                _ => {}
            }
            // It must also stay complete for longer than any message can be delayed.
            if let Some(since) = complete_since.filter(|&since| self.now > since + 6 * SECOND) {
                return self.checker.recovered(since - FAULTS_END);
            }
            let limit = bound + 6 * SECOND;
            assert!(self.now < limit, "seed {}: {}", self.seed, self.describe());
        }
        unreachable!("polls never end")
    }

    fn describe(&self) -> String {
        let run_state = self.checker.newest();
        let agents: Vec<_> = self
            .agents
            .iter()
            .map(|agent| (agent.running, &agent.session))
            .collect();
        format!(
            "incomplete {:?} after the last fault, with {} agents for {}:{}: {:?} {:?}; {agents:?}",
            self.now - FAULTS_END,
            self.agents.len(),
            self.policy.min_nodes,
            self.policy.max_nodes,
            run_state.epoch,
            run_state.phase,
        )
    }

    /// Whether as many agents as possible run workers, all in the newest world.
    fn is_complete(&self) -> bool {
        let expected = self.agents.len().min(self.policy.max_nodes as usize);
        let newest = self.checker.newest().epoch;
        let running = self
            .agents
            .iter()
            .filter(|agent| agent.running == Some(newest) && agent.stopping.is_none());
        running.count() == expected
    }

    fn at(&mut self, time: Duration, event: SimEvent) {
        self.last_id += 1;
        self.queue.push(Reverse((time, self.last_id)));
        self.events.insert(self.last_id, event);
    }

    fn after(&mut self, wait: Duration, event: SimEvent) {
        self.at(self.now + wait, event);
    }

    fn decider(&self) -> usize {
        self.agents.len()
    }

    fn is_partitioned(&self, from: usize, to: usize) -> bool {
        self.partitions
            .get(&(from, to))
            .is_some_and(|&times| times > 0)
    }

    /// Sends a message over the network, which may lose, delay or duplicate it.
    fn send(&mut self, from: usize, to: usize, make: impl Fn() -> SimEvent) {
        let faulty = self.now < FAULTS_END;
        if self.is_partitioned(from, to) || (faulty && self.rng.one_in(30)) {
            return;
        }
        let copies = if faulty && self.rng.one_in(20) { 2 } else { 1 };
        for _ in 0..copies {
            let late = faulty && self.rng.one_in(25);
            let wait = self.rng.millis(1, if late { 4000 } else { 60 });
            self.after(wait, make());
        }
    }

    fn handle(&mut self, event: SimEvent) {
        match event {
            SimEvent::Fault(fault) => self.fault(fault),
            SimEvent::ToServer(request) => self.serve(request),
            SimEvent::ToAgent {
                agent,
                instance,
                response,
            } => self.handle_response(agent, instance, response),
            SimEvent::Poll(agent) => {
                let wait = self.rng.millis(1, POLL);
                self.after(wait, SimEvent::Poll(agent));
                self.follow(agent);
            }
            SimEvent::Heartbeat(agent) => {
                self.after(self.policy.heartbeat(), SimEvent::Heartbeat(agent));
                if self.is_awake(agent) {
                    let requests = self.agents[agent].session.poll_requests(self.now);
                    self.send_requests(agent, requests);
                }
            }
            SimEvent::Stopped {
                agent,
                instance,
                epoch,
            } => self.stopped(agent, instance, epoch),
            SimEvent::ServerWakes => self.decide(None),
            SimEvent::Steps => {
                self.after(Duration::from_millis(97), SimEvent::Steps);
                self.steps();
            }
        }
    }

    fn is_awake(&self, agent: usize) -> bool {
        self.agents[agent].is_up && !self.agents[agent].is_frozen
    }

    fn fault(&mut self, fault: Fault) {
        let change = |counts: &mut BTreeMap<usize, u32>, node, by: i32| {
            let count = counts.entry(node).or_default();
            *count = count.saturating_add_signed(by);
            *count
        };
        match fault {
            Fault::Partition { from, to } => *self.partitions.entry((from, to)).or_default() += 1,
            Fault::Heal { from, to } => *self.partitions.entry((from, to)).or_default() -= 1,
            Fault::Crash(node) => {
                change(&mut self.down, node, 1);
                self.crash(node);
            }
            Fault::Restart(node) => {
                if change(&mut self.down, node, -1) == 0 {
                    self.restart(node);
                }
            }
            Fault::Freeze(node) => {
                change(&mut self.frozen, node, 1);
                self.set_frozen(node, true);
            }
            Fault::Thaw(node) => {
                let frozen = change(&mut self.frozen, node, -1) > 0;
                self.set_frozen(node, frozen);
            }
            Fault::Fail(agent) => self.fail(agent),
        }
    }

    fn crash(&mut self, node: usize) {
        match self.agents.get_mut(node) {
            Some(agent) => (agent.is_up, agent.running, agent.stopping) = (false, None, None),
            None => self.server = None,
        }
    }

    fn restart(&mut self, node: usize) {
        let instance = self.rng.next();
        match self.agents.get_mut(node) {
            Some(agent) => {
                (agent.is_up, agent.reported) = (true, Epoch(0));
                agent.session = ClientSession::new(join(node, instance, &self.policy));
            }
            None => {
                let coordinator = Coordinator::resume(self.durable.clone(), self.now);
                if let Some(at) = coordinator.wake_at() {
                    self.at(at, SimEvent::ServerWakes);
                }
                self.server = Some(coordinator);
            }
        }
    }

    fn set_frozen(&mut self, node: usize, frozen: bool) {
        match self.agents.get_mut(node) {
            Some(agent) => {
                agent.is_frozen = frozen;
                // The agent checks its decision first: it cannot prevent steps that workers commit before it resumes.
                self.follow(node);
            }
            None => {
                self.server_frozen = frozen;
                if !frozen {
                    self.after(Duration::ZERO, SimEvent::ServerWakes);
                }
            }
        }
    }

    fn fail(&mut self, agent: usize) {
        let now = self.now;
        let this = &mut self.agents[agent];
        let Some(epoch) = this.running.filter(|_| this.is_up && !this.is_frozen) else {
            return;
        };
        let message = "a worker failed".to_owned();
        let request = this.session.report(
            epoch,
            Report::Failed {
                message,
                is_final: false,
            },
            now,
        );
        self.send_requests(agent, request.into_iter().collect());
    }

    fn send_requests(&mut self, agent: usize, requests: Vec<Request>) {
        let decider = self.decider();
        for request in requests {
            self.send(agent, decider, || SimEvent::ToServer(request.clone()));
        }
    }

    fn serve(&mut self, request: Request) {
        if self.server_frozen {
            // The request stays in a socket buffer.
            let wait = self.rng.millis(50, 500);
            return self.after(wait, SimEvent::ToServer(request));
        }
        self.decide(Some(request));
    }

    fn decide(&mut self, request: Option<Request>) {
        if self.server_frozen {
            return;
        }
        let now = self.now;
        let Some(coordinator) = &mut self.server else {
            return;
        };
        let reply = match request.clone() {
            Some(request) => coordinator.handle(request, now),
            None => coordinator.tick(now),
        };
        let wake_at = coordinator.wake_at();
        let published = reply.publish.then(|| coordinator.run_state().clone());
        if let Some(at) = wake_at {
            self.at(at, SimEvent::ServerWakes);
        }
        if let Some(run_state) = published {
            self.publish(&run_state);
        }
        let (Some(coordinator), Some(request)) = (&self.server, request) else {
            return;
        };
        let decision = reply
            .decision_for
            .map(|agent| coordinator.decision_for(&agent));
        for response in reply.response.into_iter().chain(decision) {
            self.respond(&request.node, request.instance, response);
        }
    }

    fn publish(&mut self, run_state: &RunState) {
        // Sometimes the server crashes after the state is durable and before any agent learns of it.
        self.durable = run_state.clone();
        self.checker.durable(run_state);
        if self.now < FAULTS_END && self.rng.one_in(200) {
            let decider = self.decider();
            self.fault(Fault::Crash(decider));
            self.after(SECOND, SimEvent::Fault(Fault::Restart(decider)));
            return;
        }
        let Some(coordinator) = &self.server else {
            return;
        };
        let decisions = coordinator
            .members()
            .map(|agent| (agent.clone(), coordinator.decision_for(agent)));
        for (agent, response) in decisions.collect::<Vec<_>>() {
            self.respond(&agent.node, agent.instance, response);
        }
    }

    fn respond(&mut self, node: &str, instance: u64, response: Response) {
        let agent: usize = node[1..].parse().unwrap();
        let decider = self.decider();
        self.send(decider, agent, || SimEvent::ToAgent {
            agent,
            instance,
            response: response.clone(),
        });
    }

    fn handle_response(&mut self, agent: usize, instance: u64, response: Response) {
        let this = &mut self.agents[agent];
        if !this.is_up || this.session.node_info().instance != instance {
            return;
        }
        if this.is_frozen {
            let wait = self.rng.millis(50, 500);
            return self.after(
                wait,
                SimEvent::ToAgent {
                    agent,
                    instance,
                    response,
                },
            );
        }
        if let Err(rejection) = this.session.handle_response(response) {
            assert!(rejection.is_retryable(), "{rejection}");
            self.checker.rejected();
        }
        self.follow(agent);
    }

    /// An agent follows its decision.
    fn follow(&mut self, agent: usize) {
        if !self.is_awake(agent) {
            return;
        }
        let this = &mut self.agents[agent];
        let decision = this.session.decide(self.now);
        let instance = this.session.node_info().instance;
        match (decision, this.running) {
            (Decision::Run(assignment), None) => {
                this.running = Some(assignment.epoch);
                let node = this.session.node_info().node.clone();
                self.checker.started(&node, &assignment);
            }
            (Decision::Run(assignment), Some(epoch)) if assignment.epoch == epoch => {}
            (Decision::LeaseExpired { .. }, Some(epoch)) => {
                this.stopping = Some(epoch);
                self.checker.lease_expired();
                self.stopped(agent, instance, epoch);
            }
            (_, Some(epoch)) if this.stopping.is_none() => {
                this.stopping = Some(epoch);
                let wait = self.rng.millis(0, 900);
                self.after(
                    wait,
                    SimEvent::Stopped {
                        agent,
                        instance,
                        epoch,
                    },
                );
            }
            // The agent may have been in a world without learning of it.
            (Decision::Wait { epoch, .. } | Decision::LeaseExpired { epoch }, None)
                if this.reported < epoch =>
            {
                this.running = Some(epoch);
                self.stopped(agent, instance, epoch);
            }
            _ => {}
        }
    }

    fn stopped(&mut self, agent: usize, instance: u64, epoch: Epoch) {
        let now = self.now;
        let this = &mut self.agents[agent];
        if !this.is_up
            || this.session.node_info().instance != instance
            || this.running != Some(epoch)
        {
            return;
        }
        (this.running, this.stopping, this.reported) = (None, None, epoch);
        let request = this.session.report(epoch, Report::Stopped, now);
        self.send_requests(agent, request.into_iter().collect());
    }

    /// Workers commit a step only if all members of their world run and reach each other.
    fn steps(&mut self) {
        let epochs: BTreeSet<Epoch> = self
            .agents
            .iter()
            .filter_map(|agent| agent.running)
            .collect();
        for epoch in epochs {
            let members: Vec<usize> = self
                .checker
                .world(epoch)
                .iter()
                .map(|node| node[1..].parse().unwrap())
                .collect();
            let in_it =
                |&agent: &usize| self.agents[agent].running == Some(epoch) && self.is_awake(agent);
            let reach = |&a: &usize| members.iter().all(|&b| !self.is_partitioned(a, b));
            if members.iter().all(in_it) && members.iter().all(reach) {
                self.checker.step(epoch);
            }
        }
    }
}
