//! The agent that decides for all, as long as it holds the steward's key.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::time::{Instant, sleep_until};

use super::kv::{Change, Compare, Entry, Kv, KvError, Lease, Put, Range};
use super::seal::Seal;
use crate::{Action, Event, Join, Leases, Record, Refusal, State, step};

/// etcd takes 128 comparisons in one transaction.
const MOST_COMPARED: usize = 120;

/// Where the keys of a run are.
#[derive(Clone, Debug)]
pub struct Keys {
    run: String,
}

impl Keys {
    pub fn new(run: &str) -> Keys {
        Keys {
            run: run.to_owned(),
        }
    }

    pub fn agents(&self) -> String {
        format!("trainyard/{}/agents/", self.run)
    }

    pub fn agent(&self, node: &str) -> String {
        self.agents() + node
    }

    pub fn steward(&self) -> String {
        format!("trainyard/{}/steward", self.run)
    }

    pub fn record(&self) -> String {
        format!("trainyard/{}/record", self.run)
    }

    pub fn refusal(&self, node: &str) -> String {
        format!("trainyard/{}/refusals/{node}", self.run)
    }
}

/// What the steward and the agents of a run have in common.
#[derive(Clone)]
pub struct Store {
    pub kv: Arc<dyn Kv>,
    pub seal: Seal,
    pub keys: Keys,
    pub run: String,
}

impl Store {
    /// The record, and the revision it is of; 0 where there is none yet.
    pub async fn record(&self) -> Result<(Record, i64), KvError> {
        let (found, _) = self.kv.get(Range::Key(self.keys.record())).await?;
        match found.first() {
            Some(entry) => Ok((self.open_record(entry)?, entry.modified)),
            None => Ok((Record::new(&self.run), 0)),
        }
    }

    pub fn open_record(&self, entry: &Entry) -> Result<Record, KvError> {
        let record = self.seal.open(&entry.key, &entry.value);
        record.map_err(|cause| KvError(format!("{}: {cause}", entry.key)))
    }
}

/// Decides until the key is lost or something goes wrong. Either way nothing is lost: all that counts is in the store.
pub async fn decide(store: Store, lease: Lease) -> Result<(), KvError> {
    let own = store.keys.steward();
    let mine = Put {
        key: own.clone(),
        value: Vec::new(),
        lease: Some(lease),
    };
    let free = Compare::Modified(own.clone(), 0);
    let since = match store.kv.put_if(vec![free], vec![mine]).await? {
        Some(since) => since,
        None => {
            // Ours after all, if an earlier answer was lost; else somebody else decides.
            let (found, _) = store.kv.get(Range::Key(own)).await?;
            match found.first().filter(|entry| entry.lease == Some(lease)) {
                Some(entry) => entry.created,
                None => return Ok(()),
            }
        }
    };
    Steward::take_over(store, since).await?.serve().await
}

struct Steward {
    store: Store,
    /// When the steward's key came to be: it is ours as long as this holds.
    since: i64,
    state: Option<State>,
    started: Instant,
    /// The record in the store, and its revision.
    stored: (Record, i64),
    /// Who is known by which key's lease, for refusals to go with.
    leases: BTreeMap<String, Option<Lease>>,
    refusals: Vec<(String, u64, Refusal)>,
    watched_from: i64,
}

impl Steward {
    async fn take_over(store: Store, since: i64) -> Result<Steward, KvError> {
        let (record, revision) = store.record().await?;
        let (mut agents, now) = store.kv.get(Range::Prefix(store.keys.agents())).await?;
        agents.sort_by_key(|entry| entry.created);
        let stored = (record.clone(), revision);
        let members: Vec<String> = record
            .world
            .iter()
            .map(|member| member.node.clone())
            .collect();
        let mut steward = Steward {
            since,
            state: Some(State::resume(record, Leases::Watched, Duration::ZERO)),
            started: Instant::now(),
            stored,
            leases: BTreeMap::new(),
            refusals: Vec::new(),
            watched_from: now + 1,
            store,
        };
        // Whoever has no key, or another instance under it, is not there any more.
        let there: BTreeMap<String, Join> = agents
            .iter()
            .filter_map(|entry| Some((steward.node(&entry.key)?, steward.open(entry)?)))
            .collect();
        for node in members {
            let advert = steward.state.as_ref().and_then(|state| state.agent(&node));
            let is_there = there
                .get(&node)
                .zip(advert)
                .is_some_and(|(join, advert)| join.advert.is(advert));
            if !is_there {
                steward.step(Event::Lost { node });
            }
        }
        for entry in agents {
            steward.take(Change::Put(entry));
        }
        Ok(steward)
    }

    async fn serve(mut self) -> Result<(), KvError> {
        let agents = Range::Prefix(self.store.keys.agents());
        let mut changes = self.store.kv.watch(vec![agents], self.watched_from).await?;
        loop {
            self.step(Event::Tick);
            self.store_what_is_new().await?;
            let wake_at = self
                .state
                .as_ref()
                .and_then(State::wake_at)
                .map(|at| self.started + at);
            let sleep = async {
                match wake_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                next = changes.next() => match next {
                    Some(changes) => changes?.into_iter().for_each(|change| self.take(change)),
                    None => return Err(KvError("the watch ended".into())),
                },
                () = sleep => {}
            }
        }
    }

    fn take(&mut self, change: Change) {
        match change {
            Change::Put(entry) => {
                let (Some(node), Some(join)) = (self.node(&entry.key), self.open(&entry)) else {
                    return;
                };
                if join.advert.node != node {
                    return; // sealed for this key by a faulty agent
                }
                self.leases.insert(node.clone(), entry.lease);
                let instance = join.advert.instance;
                if let Some(refusal) = self.step(Event::Join(Box::new(join))) {
                    self.refusals.push((node, instance, refusal));
                }
            }
            Change::Gone { key } => {
                if let Some(node) = self.node(&key) {
                    self.leases.remove(&node);
                    self.step(Event::Lost { node });
                }
            }
        }
    }

    fn node(&self, key: &str) -> Option<String> {
        key.strip_prefix(&self.store.keys.agents())
            .map(str::to_owned)
    }

    fn open(&self, entry: &Entry) -> Option<Join> {
        let opened = self.store.seal.open(&entry.key, &entry.value);
        opened
            .inspect_err(|cause| tracing::warn!(key = entry.key, cause, "ignored"))
            .ok()
    }

    fn step(&mut self, event: Event) -> Option<Refusal> {
        let state = self.state.take()?;
        let step = step(state, event, self.started.elapsed());
        self.state = Some(step.state);
        step.actions.into_iter().find_map(|action| match action {
            Action::Refuse(refusal) => Some(refusal),
            _ => None,
        })
    }

    /// One transaction for the record, whatever happened since the last; it fails if another has become steward.
    async fn store_what_is_new(&mut self) -> Result<(), KvError> {
        let keys = &self.store.keys;
        let mine = Compare::Created(keys.steward(), self.since);
        for (node, instance, refusal) in std::mem::take(&mut self.refusals) {
            let key = keys.refusal(&node);
            let lease = self.leases.get(&node).copied().flatten();
            let value = self.store.seal.close(&key, &(instance, refusal));
            // Its lease may be over by now; then nobody is left to be told.
            let told = self
                .store
                .kv
                .put_if(vec![mine.clone()], vec![Put { key, value, lease }])
                .await;
            let _ = told.inspect_err(|error| tracing::warn!(%error, "refusal"));
        }
        let Some(state) = self
            .state
            .as_ref()
            .filter(|state| state.record().version != self.stored.0.version)
        else {
            return Ok(());
        };
        let record = state.record().clone();
        tracing::info!(version = record.version, epoch = record.epoch.0, phase = ?record.phase, "record");
        let mut compare = vec![mine, Compare::Modified(keys.record(), self.stored.1)];
        compare.extend(
            self.lost(state)
                .into_iter()
                .map(|node| Compare::Modified(keys.agent(&node), 0)),
        );
        let put = Put {
            key: keys.record(),
            value: self.store.seal.close(&keys.record(), &record),
            lease: None,
        };
        match self.store.kv.put_if(compare, vec![put]).await? {
            Some(revision) => self.stored = (record, revision),
            None => return Err(KvError("another agent is steward, or one came back".into())),
        }
        Ok(())
    }

    /// Members of the stored world that a new one does without. Their keys must still be gone when it is stored: one
    /// that came back meanwhile may have workers.
    fn lost(&self, state: &State) -> Vec<String> {
        if state.record().epoch == self.stored.0.epoch {
            return Vec::new();
        }
        let members = self
            .stored
            .0
            .world
            .iter()
            .filter(|member| state.agent(&member.node).is_none());
        members
            .map(|member| member.node.clone())
            .take(MOST_COMPARED)
            .collect()
    }
}
