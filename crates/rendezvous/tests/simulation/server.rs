//! N agents and one server, in virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use trainyard_rendezvous::{
    Address, Advert, Answer, Call, Decision, Desk, Epoch, Join, Letter, Policy, Record, Report,
    Seen,
};

use crate::chaos::{Chance, Fault, faults};
use crate::judge::{Judge, Totals};

const FAULTS_END: Duration = Duration::from_secs(40);
/// How late an agent may look at its lease: a sixth of it is kept for that.
const POLL: u64 = 300;
const SECOND: Duration = Duration::from_secs(1);

/// How soon a run must work again after the last fault: a lease until the dead are known to be dead and names
/// are free, and a few seconds to stop workers, gather and hear of it over a network that still loses letters.
fn bound(policy: &Policy) -> Duration {
    policy.lease + 6 * SECOND
}

pub fn simulate(seed: u64) -> Totals {
    Simulation::new(seed).run()
}

#[derive(Debug)]
enum Happening {
    Fault(Fault),
    ToServer(Letter),
    ToAgent {
        agent: usize,
        instance: u64,
        answer: Answer,
    },
    /// An agent looks at what it is to do.
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
    call: Call,
    is_up: bool,
    is_frozen: bool,
    runs: Option<Epoch>,
    /// It is stopping the workers of this epoch, which commit no more.
    stops: Option<Epoch>,
    /// The newest epoch of which it said that it has no workers.
    said: Epoch,
}

struct Simulation {
    seed: u64,
    chance: Chance,
    judge: Judge,
    policy: Policy,
    now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    happenings: BTreeMap<u64, Happening>,
    numbered: u64,
    cut: BTreeMap<(usize, usize), u32>,
    agents: Vec<Agent>,
    server: Option<Desk>,
    server_frozen: bool,
    disk: Record,
    down: BTreeMap<usize, u32>,
    frozen: BTreeMap<usize, u32>,
}

pub fn join(agent: usize, instance: u64, policy: &Policy) -> Join {
    let node = format!("n{agent}");
    let store = Address {
        host: node.clone(),
        port: 1,
    };
    let advert = Advert {
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
        advert,
        seen: Seen::default(),
        said: None,
    }
}

impl Simulation {
    fn new(seed: u64) -> Simulation {
        let mut chance = Chance::new(seed);
        let num_agents = 2 + chance.below(6) as usize;
        let min = 1 + chance.below(num_agents as u64) as u32;
        // Sometimes with spares, sometimes with room.
        let max = min + chance.below(4) as u32;
        let mut policy = Policy::new(min, max);
        policy.max_restarts = 1000;
        policy.last_call = 2 * SECOND;
        policy.stop_within = 3 * SECOND;
        let agents = (0..num_agents).map(|agent| Agent {
            call: Call::new(join(agent, chance.next(), &policy)),
            is_up: true,
            is_frozen: false,
            runs: None,
            stops: None,
            said: Epoch(0),
        });
        let agents: Vec<Agent> = agents.collect();
        let disk = Record::new("job");
        let mut simulation = Simulation {
            seed,
            judge: Judge::new(seed),
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            numbered: 0,
            cut: BTreeMap::new(),
            server: Some(Desk::resume(disk.clone(), Duration::ZERO)),
            server_frozen: false,
            disk,
            down: BTreeMap::new(),
            frozen: BTreeMap::new(),
            policy,
            agents,
            chance,
        };
        simulation.prepare();
        simulation
    }

    fn prepare(&mut self) {
        for (at, fault) in faults(&mut self.chance, self.agents.len(), FAULTS_END) {
            self.at(at, Happening::Fault(fault));
        }
        for agent in 0..self.agents.len() {
            let first = self.chance.millis(0, 2000);
            self.at(first, Happening::Heartbeat(agent));
            self.at(first, Happening::Poll(agent));
        }
        self.at(SECOND, Happening::Steps);
    }

    /// Until the run works again after the last fault, or for too long.
    fn run(mut self) -> Totals {
        let bound = FAULTS_END + bound(&self.policy);
        let mut whole_since = None;
        while let Some(Reverse((time, number))) = self.queue.pop() {
            self.now = time;
            let Some(happening) = self.happenings.remove(&number) else {
                continue;
            };
            self.happen(happening);
            if self.now < FAULTS_END {
                continue;
            }
            match (self.is_whole(), whole_since) {
                (true, None) => whole_since = Some(self.now),
                (false, Some(_)) => whole_since = None,
                _ => {}
            }
            // It also has to last: longer than anything that could still come late.
            if let Some(since) = whole_since.filter(|&since| self.now > since + 6 * SECOND) {
                return self.judge.healed(since - FAULTS_END);
            }
            let limit = bound + 6 * SECOND;
            assert!(self.now < limit, "seed {}: {}", self.seed, self.complaint());
        }
        unreachable!("polls go on for ever")
    }

    fn complaint(&self) -> String {
        let record = self.judge.newest();
        let agents: Vec<_> = self
            .agents
            .iter()
            .map(|agent| (agent.runs, &agent.call))
            .collect();
        format!(
            "not whole {:?} after the last fault, with {} agents for {}:{}: {:?} {:?}; {agents:?}",
            self.now - FAULTS_END,
            self.agents.len(),
            self.policy.min_nodes,
            self.policy.max_nodes,
            record.epoch,
            record.phase,
        )
    }

    /// Every agent that can have a place has one, in the same world.
    fn is_whole(&self) -> bool {
        let places = self.agents.len().min(self.policy.max_nodes as usize);
        let newest = self.judge.newest().epoch;
        let running = self
            .agents
            .iter()
            .filter(|agent| agent.runs == Some(newest) && agent.stops.is_none());
        running.count() == places
    }

    fn at(&mut self, time: Duration, happening: Happening) {
        self.numbered += 1;
        self.queue.push(Reverse((time, self.numbered)));
        self.happenings.insert(self.numbered, happening);
    }

    fn soon(&mut self, wait: Duration, happening: Happening) {
        self.at(self.now + wait, happening);
    }

    fn hub(&self) -> usize {
        self.agents.len()
    }

    fn is_cut(&self, from: usize, to: usize) -> bool {
        self.cut.get(&(from, to)).is_some_and(|&times| times > 0)
    }

    /// Over the network: lost, late, or twice.
    fn send(&mut self, from: usize, to: usize, make: impl Fn() -> Happening) {
        let faulty = self.now < FAULTS_END;
        if self.is_cut(from, to) || (faulty && self.chance.one_in(30)) {
            return;
        }
        let copies = if faulty && self.chance.one_in(20) {
            2
        } else {
            1
        };
        for _ in 0..copies {
            let late = faulty && self.chance.one_in(25);
            let wait = self.chance.millis(1, if late { 4000 } else { 60 });
            self.soon(wait, make());
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Fault(fault) => self.fault(fault),
            Happening::ToServer(letter) => self.serve(letter),
            Happening::ToAgent {
                agent,
                instance,
                answer,
            } => self.hear(agent, instance, answer),
            Happening::Poll(agent) => {
                let wait = self.chance.millis(1, POLL);
                self.soon(wait, Happening::Poll(agent));
                self.follow(agent);
            }
            Happening::Heartbeat(agent) => {
                self.soon(self.policy.heartbeat(), Happening::Heartbeat(agent));
                if self.is_awake(agent) {
                    let letters = self.agents[agent].call.speak(self.now);
                    self.post(agent, letters);
                }
            }
            Happening::Stopped {
                agent,
                instance,
                epoch,
            } => self.stopped(agent, instance, epoch),
            Happening::ServerWakes => self.decide(None),
            Happening::Steps => {
                self.soon(Duration::from_millis(97), Happening::Steps);
                self.steps();
            }
        }
    }

    fn is_awake(&self, agent: usize) -> bool {
        self.agents[agent].is_up && !self.agents[agent].is_frozen
    }

    fn fault(&mut self, fault: Fault) {
        let change = |counts: &mut BTreeMap<usize, u32>, who, by: i32| {
            let count = counts.entry(who).or_default();
            *count = count.saturating_add_signed(by);
            *count
        };
        match fault {
            Fault::Cut { from, to } => *self.cut.entry((from, to)).or_default() += 1,
            Fault::Mend { from, to } => *self.cut.entry((from, to)).or_default() -= 1,
            Fault::Crash(who) => {
                change(&mut self.down, who, 1);
                self.crash(who);
            }
            Fault::Restart(who) => {
                if change(&mut self.down, who, -1) == 0 {
                    self.restart(who);
                }
            }
            Fault::Freeze(who) => {
                change(&mut self.frozen, who, 1);
                self.set_frozen(who, true);
            }
            Fault::Thaw(who) => {
                let frozen = change(&mut self.frozen, who, -1) > 0;
                self.set_frozen(who, frozen);
            }
            Fault::Fail(agent) => self.fail(agent),
        }
    }

    fn crash(&mut self, who: usize) {
        match self.agents.get_mut(who) {
            Some(agent) => (agent.is_up, agent.runs, agent.stops) = (false, None, None),
            None => self.server = None,
        }
    }

    fn restart(&mut self, who: usize) {
        let instance = self.chance.next();
        match self.agents.get_mut(who) {
            Some(agent) => {
                (agent.is_up, agent.said) = (true, Epoch(0));
                agent.call = Call::new(join(who, instance, &self.policy));
            }
            None => {
                let desk = Desk::resume(self.disk.clone(), self.now);
                if let Some(at) = desk.wake_at() {
                    self.at(at, Happening::ServerWakes);
                }
                self.server = Some(desk);
            }
        }
    }

    fn set_frozen(&mut self, who: usize, frozen: bool) {
        match self.agents.get_mut(who) {
            Some(agent) => {
                agent.is_frozen = frozen;
                // Its first act: no agent can keep workers from a step that they take before it wakes.
                self.follow(who);
            }
            None => {
                self.server_frozen = frozen;
                if !frozen {
                    self.soon(Duration::ZERO, Happening::ServerWakes);
                }
            }
        }
    }

    fn fail(&mut self, agent: usize) {
        let now = self.now;
        let this = &mut self.agents[agent];
        let Some(epoch) = this.runs.filter(|_| this.is_up && !this.is_frozen) else {
            return;
        };
        let message = "a worker failed".to_owned();
        let letter = this.call.report(epoch, Report::Failed { message }, now);
        self.post(agent, letter.into_iter().collect());
    }

    fn post(&mut self, agent: usize, letters: Vec<Letter>) {
        let hub = self.hub();
        for letter in letters {
            self.send(agent, hub, || Happening::ToServer(letter.clone()));
        }
    }

    fn serve(&mut self, letter: Letter) {
        if self.server_frozen {
            // It lies in a buffer.
            let wait = self.chance.millis(50, 500);
            return self.soon(wait, Happening::ToServer(letter));
        }
        self.decide(Some(letter));
    }

    fn decide(&mut self, letter: Option<Letter>) {
        if self.server_frozen {
            return;
        }
        let now = self.now;
        let Some(desk) = &mut self.server else {
            return;
        };
        let reply = match letter.clone() {
            Some(letter) => desk.receive(letter, now),
            None => desk.tick(now),
        };
        let wake_at = desk.wake_at();
        let told = reply.publish.then(|| desk.record().clone());
        if let Some(at) = wake_at {
            self.at(at, Happening::ServerWakes);
        }
        if let Some(record) = told {
            self.publish(&record);
        }
        let (Some(desk), Some(letter)) = (&self.server, letter) else {
            return;
        };
        let told = reply.tell.map(|agent| desk.tell(&agent));
        for answer in reply.answer.into_iter().chain(told) {
            self.tell(&letter.node, letter.instance, answer);
        }
    }

    fn publish(&mut self, record: &Record) {
        // A crash between the disk and the network.
        self.disk = record.clone();
        self.judge.durable(record);
        if self.now < FAULTS_END && self.chance.one_in(200) {
            let hub = self.hub();
            self.fault(Fault::Crash(hub));
            self.soon(SECOND, Happening::Fault(Fault::Restart(hub)));
            return;
        }
        let Some(desk) = &self.server else {
            return;
        };
        let told = desk
            .attending()
            .map(|agent| (agent.clone(), desk.tell(agent)));
        for (agent, answer) in told.collect::<Vec<_>>() {
            self.tell(&agent.node, agent.instance, answer);
        }
    }

    fn tell(&mut self, node: &str, instance: u64, answer: Answer) {
        let agent: usize = node[1..].parse().unwrap();
        let hub = self.hub();
        self.send(hub, agent, || Happening::ToAgent {
            agent,
            instance,
            answer: answer.clone(),
        });
    }

    fn hear(&mut self, agent: usize, instance: u64, answer: Answer) {
        let this = &mut self.agents[agent];
        if !this.is_up || this.call.advert().instance != instance {
            return;
        }
        if this.is_frozen {
            let wait = self.chance.millis(50, 500);
            return self.soon(
                wait,
                Happening::ToAgent {
                    agent,
                    instance,
                    answer,
                },
            );
        }
        if let Err(refusal) = this.call.hear(answer) {
            assert!(refusal.passes(), "{refusal}");
            self.judge.refused();
        }
        self.follow(agent);
    }

    /// An agent does what it is to do.
    fn follow(&mut self, agent: usize) {
        if !self.is_awake(agent) {
            return;
        }
        let this = &mut self.agents[agent];
        let decision = this.call.decide(self.now);
        let instance = this.call.advert().instance;
        match (decision, this.runs) {
            (Decision::Run(place), None) => {
                this.runs = Some(place.epoch);
                let node = this.call.advert().node.clone();
                self.judge.started(&node, &place);
            }
            (Decision::Run(place), Some(epoch)) if place.epoch == epoch => {}
            (Decision::Lapsed { .. }, Some(epoch)) => {
                this.stops = Some(epoch);
                self.judge.lapsed();
                self.stopped(agent, instance, epoch);
            }
            (_, Some(epoch)) if this.stops.is_none() => {
                this.stops = Some(epoch);
                let wait = self.chance.millis(0, 900);
                self.soon(
                    wait,
                    Happening::Stopped {
                        agent,
                        instance,
                        epoch,
                    },
                );
            }
            // It may have been in a world without having heard of it.
            (Decision::Wait { epoch, .. } | Decision::Lapsed { epoch }, None)
                if this.said < epoch =>
            {
                this.runs = Some(epoch);
                self.stopped(agent, instance, epoch);
            }
            _ => {}
        }
    }

    fn stopped(&mut self, agent: usize, instance: u64, epoch: Epoch) {
        let now = self.now;
        let this = &mut self.agents[agent];
        if !this.is_up || this.call.advert().instance != instance || this.runs != Some(epoch) {
            return;
        }
        (this.runs, this.stops, this.said) = (None, None, epoch);
        let letter = this.call.report(epoch, Report::Stopped, now);
        self.post(agent, letter.into_iter().collect());
    }

    /// A step needs every member of a world, and that they reach each other.
    fn steps(&mut self) {
        let epochs: BTreeSet<Epoch> = self.agents.iter().filter_map(|agent| agent.runs).collect();
        for epoch in epochs {
            let members: Vec<usize> = self
                .judge
                .world(epoch)
                .iter()
                .map(|node| node[1..].parse().unwrap())
                .collect();
            let in_it =
                |&agent: &usize| self.agents[agent].runs == Some(epoch) && self.is_awake(agent);
            let reach = |&a: &usize| members.iter().all(|&b| !self.is_cut(a, b));
            if members.iter().all(in_it) && members.iter().all(reach) {
                self.judge.step(epoch);
            }
        }
    }
}
