//! N agents and a store with etcd's meaning, in virtual time: the same code that speaks to etcd, over a store that loses
//! questions, loses answers, is late, and goes away.

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
use trainyard_rendezvous::{Backend, Decision, Epoch, Policy, Record, Report, Seat, Secret};

use crate::chaos::{Chance, Fault, faults};
use crate::judge::{Judge, Totals};
use crate::server::join;

const FAULTS_END: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);
const GIVE_UP: Duration = Duration::from_millis(1500);

/// After the last fault: leases of the dead end, the name of one that came back is free, a steward is found, workers
/// stop, and the last call passes.
const BOUND: Duration = Duration::from_secs(12);

pub fn simulate(seed: u64) -> Totals {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    runtime.block_on(run(seed))
}

/// All that is shared; whoever locks it never waits while holding it.
struct World {
    chance: Chance,
    judge: Judge,
    store: Store,
    is_faulty: bool,
    is_down: bool,
    cut: BTreeMap<(usize, usize), i32>,
    /// What each agent's workers are of.
    runs: Vec<Option<Epoch>>,
    /// What each was told last.
    told: Vec<Option<Decision>>,
}

type Shared = Arc<Mutex<World>>;

fn lock(world: &Shared) -> MutexGuard<'_, World> {
    world.lock().expect("the judge was content so far")
}

#[derive(Default)]
struct Store {
    revision: i64,
    keys: BTreeMap<String, Entry>,
    leases: BTreeMap<Lease, (Duration, Instant)>,
    numbered: i64,
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
        let over =
            |(lease, (_, ends)): (&Lease, &(Duration, Instant))| (*ends <= now).then_some(*lease);
        let over: Vec<Lease> = self.leases.iter().filter_map(over).collect();
        over.into_iter().for_each(|lease| self.end(lease));
    }

    fn end(&mut self, lease: Lease) {
        self.leases.remove(&lease);
        let with = |entry: &&Entry| entry.lease == Some(lease);
        let gone: Vec<String> = self
            .keys
            .values()
            .filter(with)
            .map(|entry| entry.key.clone())
            .collect();
        for key in gone {
            self.revision += 1;
            self.keys.remove(&key);
            self.change(Change::Gone { key });
        }
    }

    fn holds(&self, compare: &Compare) -> bool {
        match compare {
            Compare::Modified(key, at) => {
                self.keys.get(key).map_or(0, |entry| entry.modified) == *at
            }
            Compare::Created(key, at) => self.keys.get(key).map_or(0, |entry| entry.created) == *at,
        }
    }

    fn put(&mut self, put: Put) {
        let created = self
            .keys
            .get(&put.key)
            .map_or(self.revision, |entry| entry.created);
        let entry = Entry {
            key: put.key.clone(),
            value: put.value,
            created,
            modified: self.revision,
            lease: put.lease,
        };
        self.keys.insert(put.key, entry.clone());
        self.change(Change::Put(entry));
    }
}

fn key_of(change: &Change) -> &str {
    match change {
        Change::Put(entry) => &entry.key,
        Change::Gone { key } => key,
    }
}

impl World {
    fn is_cut(&self, from: usize, to: usize) -> bool {
        self.cut.get(&(from, to)).is_some_and(|&times| times > 0)
    }

    fn hub(&self) -> usize {
        self.runs.len()
    }

    fn is_lost(&mut self, from: usize, to: usize) -> bool {
        self.is_cut(from, to) || self.is_down || (self.is_faulty && self.chance.one_in(40))
    }

    fn delay(&mut self) -> Duration {
        let late = self.is_faulty && self.chance.one_in(25);
        self.chance.millis(1, if late { 3000 } else { 30 })
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
                let record: Record = serde_json::from_slice(json).unwrap();
                self.judge.durable(&record);
            }
            self.store.put(put);
        }
        Ok(Some(self.store.revision))
    }

    fn set_down(&mut self, down: bool) {
        self.is_down = down;
        self.store.watchers.clear();
        if !down {
            // As etcd does under a new leader: nobody is blamed for the time in which nobody could renew.
            let now = Instant::now();
            for (length, ends) in self.store.leases.values_mut() {
                *ends = now + *length;
            }
        }
    }
}

/// One agent's way to the store.
struct Link {
    world: Shared,
    agent: usize,
}

impl Link {
    /// A question on its way goes on even if nobody waits for the answer any more.
    async fn call<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut World) -> Result<T, KvError> + Send + 'static,
    ) -> Result<T, KvError> {
        let (world, agent) = (Arc::clone(&self.world), self.agent);
        let task = tokio::spawn(async move {
            let lost = || KvError("no answer".into());
            let wait = lock(&world).delay();
            sleep(wait).await;
            let answer = {
                let mut world = lock(&world);
                let hub = world.hub();
                if world.is_lost(agent, hub) {
                    return Err(lost());
                }
                act(&mut world)
            };
            let wait = lock(&world).delay();
            sleep(wait).await;
            let mut world = lock(&world);
            let hub = world.hub();
            match world.is_lost(hub, agent) {
                true => Err(lost()),
                false => answer,
            }
        });
        match tokio::time::timeout(GIVE_UP, task).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(KvError("no answer in time".into())),
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
            store.numbered += 1;
            let lease = Lease(store.numbered);
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

/// In order and without gaps; late, or not at all any more.
async fn deliver(
    world: Shared,
    agent: usize,
    mut changes: UnboundedReceiver<Vec<Change>>,
    to: UnboundedSender<Result<Vec<Change>, KvError>>,
) {
    while let Some(change) = changes.recv().await {
        let wait = lock(&world).delay();
        sleep(wait).await;
        let is_cut = {
            let world = lock(&world);
            world.is_cut(world.hub(), agent)
        };
        if is_cut || to.send(Ok(change)).is_err() {
            // A connection that is cut is noticed late.
            sleep(SECOND).await;
            break;
        }
    }
    let _ = to.send(Err(KvError("the watch ended".into())));
}

async fn run(seed: u64) -> Totals {
    let mut chance = Chance::new(seed);
    let num_agents = 2 + chance.below(4) as usize;
    let min = 1 + chance.below(num_agents as u64) as u32;
    let mut policy = Policy::new(min, min + chance.below(3) as u32);
    policy.max_restarts = 1000;
    policy.last_call = 2 * SECOND;
    policy.stop_within = 3 * SECOND;
    let faults = faults(&mut chance, num_agents, FAULTS_END);
    let world = Arc::new(Mutex::new(World {
        chance,
        judge: Judge::new(seed),
        store: Store::default(),
        is_faulty: true,
        is_down: false,
        cut: BTreeMap::new(),
        runs: vec![None; num_agents],
        told: vec![None; num_agents],
    }));
    let secret = Secret::random().unwrap();
    let mut play = Play {
        agents: (0..num_agents).map(|_| None).collect(),
        down: BTreeMap::new(),
        world,
        policy,
        secret,
    };
    (0..num_agents).for_each(|agent| play.start(agent));
    let steps = tokio::spawn(steps(Arc::clone(&play.world)));
    let began = Instant::now();
    for (at, fault) in faults {
        sleep_until(began + at).await;
        play.fault(fault);
    }
    sleep_until(began + FAULTS_END).await;
    lock(&play.world).is_faulty = false;
    let after = play.wait_until_whole(seed).await;
    steps.abort();
    drop(play.agents.drain(..).collect::<Vec<_>>());
    let world = Arc::clone(&play.world);
    let mut world = lock(&world);
    std::mem::replace(&mut world.judge, Judge::new(seed)).healed(after)
}

struct Play {
    world: Shared,
    policy: Policy,
    secret: Secret,
    agents: Vec<Option<(JoinHandle<()>, UnboundedSender<()>)>>,
    down: BTreeMap<usize, i32>,
}

impl Play {
    fn start(&mut self, agent: usize) {
        let instance = lock(&self.world).chance.next();
        let link = Link {
            world: Arc::clone(&self.world),
            agent,
        };
        let backend = Etcd::new(Arc::new(link), "job", &self.secret);
        let (fail, failures) = unbounded_channel();
        let (world, policy) = (Arc::clone(&self.world), self.policy.clone());
        let life = async move {
            let Ok(seat) = backend.join(join(agent, instance, &policy)).await else {
                return;
            };
            let life = Life {
                world,
                agent,
                seat,
                stopping: None,
                said: Epoch(0),
            };
            life.live(policy.heartbeat(), failures).await;
        };
        self.agents[agent] = Some((tokio::spawn(life), fail));
    }

    fn crash(&mut self, agent: usize) {
        if let Some((life, _)) = self.agents[agent].take() {
            life.abort();
        }
        lock(&self.world).runs[agent] = None;
    }

    fn fault(&mut self, fault: Fault) {
        let hub = self.agents.len();
        match fault {
            Fault::Cut { from, to } => *lock(&self.world).cut.entry((from, to)).or_default() += 1,
            Fault::Mend { from, to } => *lock(&self.world).cut.entry((from, to)).or_default() -= 1,
            // Tasks cannot be frozen: they crash instead.
            Fault::Crash(who) | Fault::Freeze(who) => {
                *self.down.entry(who).or_default() += 1;
                match who == hub {
                    true => lock(&self.world).set_down(true),
                    false => self.crash(who),
                }
            }
            Fault::Restart(who) | Fault::Thaw(who) => {
                let down = self.down.entry(who).or_default();
                *down -= 1;
                match (*down == 0, who == hub) {
                    (true, true) => lock(&self.world).set_down(false),
                    (true, false) => self.start(who),
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

    async fn wait_until_whole(&self, seed: u64) -> Duration {
        let began = Instant::now();
        let places = self.agents.len().min(self.policy.max_nodes as usize);
        let mut whole_since = None;
        loop {
            sleep(Duration::from_millis(50)).await;
            let now = began.elapsed();
            let world = lock(&self.world);
            let newest = world.judge.newest();
            let is_whole = world
                .runs
                .iter()
                .filter(|runs| **runs == Some(newest.epoch))
                .count()
                == places;
            whole_since = is_whole.then(|| whole_since.unwrap_or(now));
            if let Some(since) = whole_since.filter(|&since| now > since + 5 * SECOND) {
                return since;
            }
            assert!(
                now < BOUND + 5 * SECOND,
                "seed {seed}: not whole {now:?} after the last fault, {} agents for {}:{}: {:?} {:?}, they run {:?} and were told {:?}",
                self.agents.len(),
                self.policy.min_nodes,
                self.policy.max_nodes,
                newest.epoch,
                newest.phase,
                world.runs,
                world.told,
            );
        }
    }
}

/// An agent with workers that take a while to stop.
struct Life {
    world: Shared,
    agent: usize,
    seat: Arc<dyn Seat>,
    /// Workers of this epoch are gone at this time.
    stopping: Option<(Epoch, Instant)>,
    /// The newest epoch of which it said that it has no workers.
    said: Epoch,
}

impl Life {
    async fn live(mut self, beat: Duration, mut failures: UnboundedReceiver<()>) {
        let mut beats = tokio::time::interval(beat);
        self.follow(self.seat.decision());
        loop {
            let stops_at = self
                .stopping
                .map_or(Instant::now() + 3600 * SECOND, |(_, at)| at);
            tokio::select! {
                biased;
                next = self.seat.next() => match next {
                    Ok(decision) => self.follow(decision),
                    Err(_) => return,
                },
                () = sleep_until(stops_at) => self.stopped().await,
                Some(()) = failures.recv() => self.fail().await,
                _ = beats.tick() => self.seat.heartbeat().await,
            }
        }
    }

    async fn stopped(&mut self) {
        if let Some((epoch, _)) = self.stopping.take() {
            self.said = epoch;
            lock(&self.world).runs[self.agent] = None;
            self.seat.report(epoch, Report::Stopped).await;
            self.follow(self.seat.decision());
        }
    }

    async fn fail(&self) {
        let runs = lock(&self.world).runs[self.agent];
        if let Some(epoch) = runs {
            let message = "a worker failed".into();
            self.seat.report(epoch, Report::Failed { message }).await;
        }
    }

    fn follow(&mut self, decision: Decision) {
        let mut world = lock(&self.world);
        world.told[self.agent] = Some(decision.clone());
        match (decision, world.runs[self.agent]) {
            (Decision::Run(place), None) if self.stopping.is_none() => {
                world.judge.started(&format!("n{}", self.agent), &place);
                world.runs[self.agent] = Some(place.epoch);
            }
            (Decision::Run(place), Some(epoch)) if place.epoch == epoch => {}
            (Decision::Lapsed { epoch }, _) if epoch > self.said => {
                world.judge.lapsed();
                world.runs[self.agent] = None;
                self.stopping = Some((epoch, Instant::now()));
            }
            (_, Some(epoch)) if self.stopping.is_none() => {
                let wait = world.chance.millis(0, 900);
                self.stopping = Some((epoch, Instant::now() + wait));
            }
            (Decision::Wait { epoch, .. }, None)
                if epoch > self.said && self.stopping.is_none() =>
            {
                self.stopping = Some((epoch, Instant::now()));
            }
            _ => {}
        }
    }
}

/// A step needs every member of a world, and that they reach each other.
async fn steps(world: Shared) {
    loop {
        sleep(Duration::from_millis(97)).await;
        let mut world = lock(&world);
        world.store.expire();
        let epochs: BTreeSet<Epoch> = world.runs.iter().flatten().copied().collect();
        for epoch in epochs {
            let members: Vec<usize> = world
                .judge
                .world(epoch)
                .iter()
                .map(|node| node[1..].parse().unwrap())
                .collect();
            let in_it = |&agent: &usize| world.runs[agent] == Some(epoch);
            let reach = |&a: &usize| members.iter().all(|&b| !world.is_cut(a, b));
            if members.iter().all(in_it) && members.iter().all(reach) {
                world.judge.step(epoch);
            }
        }
    }
}
