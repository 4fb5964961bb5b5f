//! Agents and a store with the semantics of etcd, in virtual time: the code of the etcd backend, over a store that
//! loses requests and responses, is slow, and fails.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_stream::wrappers::UnboundedReceiverStream;
use trainyard_rendezvous::etcd::{Change, Compare, Entry, Etcd, Kv, KvError, Lease, Put, Range};
use trainyard_rendezvous::{
    Backend, Decision, Epoch, Membership, Policy, Report, RunSecret, RunState,
};

use super::faults::{Fault, Rng, faults};
use super::invariants::{InvariantChecker, Totals};
use super::server::join;

const FAULTS_END: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);
const CALL_TIMEOUT: Duration = Duration::from_millis(1500);

/// The maximum time from the last fault to a complete world: leases of crashed agents expire, their names are free, a
/// leader is elected, workers stop, and the last call ends.
const BOUND: Duration = Duration::from_secs(12);

pub fn simulate(seed: u64) -> Totals {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    runtime.block_on(run(seed))
}

/// A value as the backend stores it.
#[derive(serde::Deserialize)]
struct Stored {
    value: RunState,
}

/// Everything that the tasks share. No task waits while it holds the lock.
struct World {
    rng: Rng,
    checker: InvariantChecker,
    store: Store,
    is_faulty: bool,
    is_down: bool,
    partitions: BTreeMap<(usize, usize), i32>,
    /// The epoch of each agent's workers.
    running: Vec<Option<Epoch>>,
    /// The last decision of each agent.
    decisions: Vec<Option<Decision>>,
}

type Shared = Arc<Mutex<World>>;

fn lock(world: &Shared) -> MutexGuard<'_, World> {
    world.lock().expect("no invariant was violated so far")
}

#[derive(Default)]
struct Store {
    revision: i64,
    keys: BTreeMap<String, Entry>,
    leases: BTreeMap<Lease, (Duration, Instant)>,
    last_lease: i64,
    log: Vec<(i64, Change)>,
    watchers: Vec<(Vec<Range>, usize, UnboundedSender<Vec<Change>>)>,
}

impl Store {
    fn change(&mut self, change: Change) {
        self.log.push((self.revision, change.clone()));
        let key = key_of(&change);
        for (ranges, _, to) in &self.watchers {
            if ranges.iter().any(|range| range.contains(key)) {
                let _ = to.send(vec![change.clone()]);
            }
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        let expired =
            |(lease, (_, ends)): (&Lease, &(Duration, Instant))| (*ends <= now).then_some(*lease);
        let expired: Vec<Lease> = self.leases.iter().filter_map(expired).collect();
        expired.into_iter().for_each(|lease| self.end(lease));
    }

    fn end(&mut self, lease: Lease) {
        self.leases.remove(&lease);
        let with = |entry: &&Entry| entry.lease == Some(lease);
        let deleted: Vec<String> = self
            .keys
            .values()
            .filter(with)
            .map(|entry| entry.key.clone())
            .collect();
        for key in deleted {
            self.revision += 1;
            self.keys.remove(&key);
            self.change(Change::Deleted { key });
        }
    }

    fn holds(&self, compare: &Compare) -> bool {
        match compare {
            Compare::ModRevision(key, at) => {
                self.keys.get(key).map_or(0, |entry| entry.mod_revision) == *at
            }
            Compare::CreateRevision(key, at) => {
                self.keys.get(key).map_or(0, |entry| entry.create_revision) == *at
            }
        }
    }

    fn put(&mut self, put: Put) {
        let create_revision = self
            .keys
            .get(&put.key)
            .map_or(self.revision, |entry| entry.create_revision);
        let entry = Entry {
            key: put.key.clone(),
            value: put.value,
            create_revision,
            mod_revision: self.revision,
            lease: put.lease,
        };
        self.keys.insert(put.key, entry.clone());
        self.change(Change::Put(entry));
    }
}

fn key_of(change: &Change) -> &str {
    match change {
        Change::Put(entry) => &entry.key,
        Change::Deleted { key } => key,
    }
}

impl World {
    fn is_partitioned(&self, from: usize, to: usize) -> bool {
        self.partitions
            .get(&(from, to))
            .is_some_and(|&times| times > 0)
    }

    fn decider(&self) -> usize {
        self.running.len()
    }

    fn is_lost(&mut self, from: usize, to: usize) -> bool {
        self.is_partitioned(from, to) || self.is_down || (self.is_faulty && self.rng.one_in(40))
    }

    fn delay(&mut self) -> Duration {
        let late = self.is_faulty && self.rng.one_in(25);
        self.rng.millis(1, if late { 3000 } else { 30 })
    }

    fn put_if(&mut self, compare: &[Compare], puts: Vec<Put>) -> Result<Option<i64>, KvError> {
        self.store.expire();
        if !compare.iter().all(|compare| self.store.holds(compare)) {
            return Ok(None);
        }
        let leased = puts.iter().filter_map(|put| put.lease);
        if leased
            .into_iter()
            .any(|lease| !self.store.leases.contains_key(&lease))
        {
            return Err(KvError("requested lease not found".into()));
        }
        self.store.revision += 1;
        for put in puts {
            if put.key.ends_with("/record") {
                let json = put.value.splitn(2, |&byte| byte == b'\n').nth(1).unwrap();
                let stored: Stored = serde_json::from_slice(json).unwrap();
                self.checker.durable(&stored.value);
            }
            self.store.put(put);
        }
        Ok(Some(self.store.revision))
    }

    fn set_down(&mut self, down: bool) {
        self.is_down = down;
        self.store.watchers.clear();
        if !down {
            // Like etcd under a new leader: no lease expires because it could not be renewed meanwhile.
            let now = Instant::now();
            for (length, ends) in self.store.leases.values_mut() {
                *ends = now + *length;
            }
        }
    }
}

/// The connection of one agent to the store.
struct Link {
    world: Shared,
    agent: usize,
}

impl Link {
    /// A request in flight takes effect even if the caller no longer waits for the response.
    async fn call<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut World) -> Result<T, KvError> + Send + 'static,
    ) -> Result<T, KvError> {
        let (world, agent) = (Arc::clone(&self.world), self.agent);
        let task = tokio::spawn(async move {
            let lost = || KvError("no response".into());
            let wait = lock(&world).delay();
            sleep(wait).await;
            let response = {
                let mut world = lock(&world);
                let decider = world.decider();
                if world.is_lost(agent, decider) {
                    return Err(lost());
                }
                act(&mut world)
            };
            let wait = lock(&world).delay();
            sleep(wait).await;
            let mut world = lock(&world);
            let decider = world.decider();
            if world.is_lost(decider, agent) {
                Err(lost())
            } else {
                response
            }
        });
        match tokio::time::timeout(CALL_TIMEOUT, task).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(KvError("no response in time".into())),
        }
    }
}

#[async_trait]
impl Kv for Link {
    fn describe(&self) -> String {
        "simulated".into()
    }

    async fn grant(&self, length: Duration) -> Result<Lease, KvError> {
        self.call(move |world| {
            let store = &mut world.store;
            store.last_lease += 1;
            let lease = Lease(store.last_lease);
            store
                .leases
                .insert(lease, (length, Instant::now() + length));
            Ok(lease)
        })
        .await
    }

    async fn keep_alive(&self, lease: Lease) -> Result<bool, KvError> {
        self.call(move |world| {
            world.store.expire();
            let found = world.store.leases.get_mut(&lease);
            Ok(found
                .map(|(length, ends)| *ends = Instant::now() + *length)
                .is_some())
        })
        .await
    }

    async fn revoke(&self, lease: Lease) -> Result<(), KvError> {
        self.call(move |world| {
            world.store.end(lease);
            Ok(())
        })
        .await
    }

    async fn get(&self, range: Range) -> Result<(Vec<Entry>, i64), KvError> {
        self.call(move |world| {
            world.store.expire();
            let found = world
                .store
                .keys
                .values()
                .filter(|entry| range.contains(&entry.key));
            Ok((found.cloned().collect(), world.store.revision))
        })
        .await
    }

    async fn put_if(&self, compare: Vec<Compare>, puts: Vec<Put>) -> Result<Option<i64>, KvError> {
        self.call(move |world| world.put_if(&compare, puts)).await
    }

    async fn watch(
        &self,
        ranges: Vec<Range>,
        from: i64,
    ) -> Result<BoxStream<'static, Result<Vec<Change>, KvError>>, KvError> {
        let agent = self.agent;
        let changes = self
            .call(move |world| {
                let (to, changes) = unbounded_channel();
                for (revision, change) in &world.store.log {
                    if *revision >= from
                        && ranges.iter().any(|range| range.contains(key_of(change)))
                    {
                        let _ = to.send(vec![change.clone()]);
                    }
                }
                world.store.watchers.push((ranges, agent, to));
                Ok(changes)
            })
            .await?;
        let (to, delivered) = unbounded_channel();
        tokio::spawn(deliver(Arc::clone(&self.world), agent, changes, to));
        Ok(UnboundedReceiverStream::new(delivered).boxed())
    }
}

/// Delivers changes in order and without gaps, but late, until the connection is partitioned.
async fn deliver(
    world: Shared,
    agent: usize,
    mut changes: UnboundedReceiver<Vec<Change>>,
    to: UnboundedSender<Result<Vec<Change>, KvError>>,
) {
    while let Some(change) = changes.recv().await {
        let wait = lock(&world).delay();
        sleep(wait).await;
        let is_partitioned = {
            let world = lock(&world);
            world.is_partitioned(world.decider(), agent)
        };
        if is_partitioned || to.send(Ok(change)).is_err() {
            // The agent notices late that the connection is partitioned.
            sleep(SECOND).await;
            break;
        }
    }
    let _ = to.send(Err(KvError("the watch ended".into())));
}

async fn run(seed: u64) -> Totals {
    let mut rng = Rng::new(seed);
    let num_agents = 2 + rng.below(4) as usize;
    let min = 1 + rng.below(num_agents as u64) as u32;
    let mut policy = Policy::new(min, min + rng.below(3) as u32);
    policy.max_restarts = 1000;
    policy.last_call_timeout = 2 * SECOND;
    policy.stop_timeout = 3 * SECOND;
    let faults = faults(&mut rng, num_agents, FAULTS_END);
    let world = Arc::new(Mutex::new(World {
        rng,
        checker: InvariantChecker::new(seed),
        store: Store::default(),
        is_faulty: true,
        is_down: false,
        partitions: BTreeMap::new(),
        running: vec![None; num_agents],
        decisions: vec![None; num_agents],
    }));
    let secret = RunSecret::random().unwrap();
    let mut simulation = Simulation {
        agents: (0..num_agents).map(|_| None).collect(),
        down: BTreeMap::new(),
        world,
        policy,
        secret,
    };
    (0..num_agents).for_each(|agent| simulation.start(agent));
    let steps = tokio::spawn(steps(Arc::clone(&simulation.world)));
    let began = Instant::now();
    for (at, fault) in faults {
        sleep_until(began + at).await;
        simulation.fault(fault);
    }
    sleep_until(began + FAULTS_END).await;
    lock(&simulation.world).is_faulty = false;
    let after = simulation.wait_until_complete(seed).await;
    steps.abort();
    drop(simulation.agents.drain(..).collect::<Vec<_>>());
    let world = Arc::clone(&simulation.world);
    let mut world = lock(&world);
    std::mem::replace(&mut world.checker, InvariantChecker::new(seed)).recovered(after)
}

struct Simulation {
    world: Shared,
    policy: Policy,
    secret: RunSecret,
    agents: Vec<Option<(JoinHandle<()>, UnboundedSender<()>)>>,
    down: BTreeMap<usize, i32>,
}

impl Simulation {
    fn start(&mut self, agent: usize) {
        let instance = lock(&self.world).rng.next();
        let link = Link {
            world: Arc::clone(&self.world),
            agent,
        };
        let backend = Etcd::new(Arc::new(link), "job", &self.secret);
        let (fail, failures) = unbounded_channel();
        let (world, policy) = (Arc::clone(&self.world), self.policy.clone());
        let task = async move {
            let Ok(membership) = backend.join(join(agent, instance, &policy)).await else {
                return;
            };
            let agent = Agent {
                world,
                agent,
                membership,
                stopping: None,
                reported: Epoch(0),
            };
            agent.run(policy.heartbeat(), failures).await;
        };
        self.agents[agent] = Some((tokio::spawn(task), fail));
    }

    fn crash(&mut self, agent: usize) {
        if let Some((task, _)) = self.agents[agent].take() {
            task.abort();
        }
        lock(&self.world).running[agent] = None;
    }

    fn fault(&mut self, fault: Fault) {
        let decider = self.agents.len();
        match fault {
            Fault::Partition { from, to } => {
                *lock(&self.world).partitions.entry((from, to)).or_default() += 1
            }
            Fault::Heal { from, to } => {
                *lock(&self.world).partitions.entry((from, to)).or_default() -= 1
            }
            // A task cannot be paused, so the node crashes instead.
            Fault::Crash(node) | Fault::Freeze(node) => {
                *self.down.entry(node).or_default() += 1;
                if node == decider {
                    lock(&self.world).set_down(true)
                } else {
                    self.crash(node)
                }
            }
            Fault::Restart(node) | Fault::Thaw(node) => {
                let down = self.down.entry(node).or_default();
                *down -= 1;
                match (*down == 0, node == decider) {
                    (true, true) => lock(&self.world).set_down(false),
                    (true, false) => self.start(node),
                    _ => {}
                }
            }
            Fault::Fail(agent) => {
                if let Some((_, fail)) = &self.agents[agent] {
                    let _ = fail.send(());
                }
            }
        }
    }

    async fn wait_until_complete(&self, seed: u64) -> Duration {
        let began = Instant::now();
        let places = self.agents.len().min(self.policy.max_nodes as usize);
        let mut complete_since = None;
        loop {
            sleep(Duration::from_millis(50)).await;
            let now = began.elapsed();
            let world = lock(&self.world);
            let newest = world.checker.newest();
            let is_complete = world
                .running
                .iter()
                .filter(|running| **running == Some(newest.epoch))
                .count()
                == places;
            complete_since = is_complete.then(|| complete_since.unwrap_or(now));
            if let Some(since) = complete_since.filter(|&since| now > since + 5 * SECOND) {
                return since;
            }
            assert!(
                now < BOUND + 5 * SECOND,
                "seed {seed}: incomplete {now:?} after the last fault, {} agents for {}:{}: {:?} {:?}, epochs of their workers {:?}, decisions {:?}",
                self.agents.len(),
                self.policy.min_nodes,
                self.policy.max_nodes,
                newest.epoch,
                newest.phase,
                world.running,
                world.decisions,
            );
        }
    }
}

/// An agent with workers that take a while to stop.
struct Agent {
    world: Shared,
    agent: usize,
    membership: Arc<dyn Membership>,
    /// The epoch of workers that are stopping, and when they will have stopped.
    stopping: Option<(Epoch, Instant)>,
    /// The newest epoch for which the agent reported that its workers have stopped.
    reported: Epoch,
}

impl Agent {
    async fn run(mut self, interval: Duration, mut failures: UnboundedReceiver<()>) {
        let mut heartbeats = tokio::time::interval(interval);
        self.follow(self.membership.decision());
        loop {
            let stops_at = self
                .stopping
                .map_or(Instant::now() + 3600 * SECOND, |(_, at)| at);
            tokio::select! {
                biased;
                next = self.membership.next() => match next {
                    Ok(decision) => self.follow(decision),
                    Err(_) => return,
                },
                () = sleep_until(stops_at) => self.stopped().await,
                Some(()) = failures.recv() => self.fail().await,
                _ = heartbeats.tick() => self.membership.heartbeat().await,
            }
        }
    }

    async fn stopped(&mut self) {
        if let Some((epoch, _)) = self.stopping.take() {
            self.reported = epoch;
            lock(&self.world).running[self.agent] = None;
            self.membership.report(epoch, Report::Stopped).await;
            self.follow(self.membership.decision());
        }
    }

    async fn fail(&self) {
        let running = lock(&self.world).running[self.agent];
        if let Some(epoch) = running {
            let message = "a worker failed".into();
            self.membership
                .report(
                    epoch,
                    Report::Failed {
                        message,
                        is_final: false,
                    },
                )
                .await;
        }
    }

    fn follow(&mut self, decision: Decision) {
        let mut world = lock(&self.world);
        world.decisions[self.agent] = Some(decision.clone());
        match (decision, world.running[self.agent]) {
            (Decision::Run(assignment), None) if self.stopping.is_none() => {
                world
                    .checker
                    .started(&format!("n{}", self.agent), &assignment);
                world.running[self.agent] = Some(assignment.epoch);
            }
            (Decision::Run(assignment), Some(epoch)) if assignment.epoch == epoch => {}
            (Decision::LeaseExpired { epoch }, _) if epoch > self.reported => {
                world.checker.lease_expired();
                world.running[self.agent] = None;
                self.stopping = Some((epoch, Instant::now()));
            }
            (_, Some(epoch)) if self.stopping.is_none() => {
                let wait = world.rng.millis(0, 900);
                self.stopping = Some((epoch, Instant::now() + wait));
            }
            (Decision::Wait { epoch, .. }, None)
                if epoch > self.reported && self.stopping.is_none() =>
            {
                self.stopping = Some((epoch, Instant::now()));
            }
            _ => {}
        }
    }
}

/// Workers commit a step only if all members of their world run and reach each other.
async fn steps(world: Shared) {
    loop {
        sleep(Duration::from_millis(97)).await;
        let mut world = lock(&world);
        world.store.expire();
        let epochs: BTreeSet<Epoch> = world.running.iter().flatten().copied().collect();
        for epoch in epochs {
            let members: Vec<usize> = world
                .checker
                .world(epoch)
                .iter()
                .map(|node| node[1..].parse().unwrap())
                .collect();
            let in_it = |&agent: &usize| world.running[agent] == Some(epoch);
            let reach = |&a: &usize| members.iter().all(|&b| !world.is_partitioned(a, b));
            if members.iter().all(in_it) && members.iter().all(reach) {
                world.checker.step(epoch);
            }
        }
    }
}
