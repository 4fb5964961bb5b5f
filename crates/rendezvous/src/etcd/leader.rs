//! The agent that decides for the run, as long as it holds the leader's key.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::time::{Instant, sleep_until};

use super::kv::{Change, Compare, Entry, KvError, Lease, Put, Range};
use super::store::Store;
use crate::session::SessionError;
use crate::{Action, Event, Join, LeaseClock, Rejection, RunState, State, step};

/// etcd allows 128 comparisons in one transaction.
const MAX_COMPARED: usize = 120;

/// Campaigns for leadership, and decides until the leader's key is lost or an error occurs. Nothing is lost then: the
/// next leader resumes from the stored run state. Returns at once if another agent leads.
pub async fn lead(store: Store, lease: Lease) -> Result<(), SessionError> {
    match campaign(&store, lease).await? {
        Some(elected_at) => Leader::take_over(store, elected_at).await?.serve().await,
        None => Ok(()),
    }
}

/// Takes the leader's key if it is free, and returns the revision at which it was created.
async fn campaign(store: &Store, lease: Lease) -> Result<Option<i64>, KvError> {
    let key = store.keys.leader();
    let put = Put {
        key: key.clone(),
        value: Vec::new(),
        lease: Some(lease),
    };
    let is_free = Compare::ModRevision(key.clone(), 0);
    if let Some(revision) = store.kv.put_if(vec![is_free], vec![put]).await? {
        return Ok(Some(revision));
    }
    // The key is this agent's after all if the response to an earlier attempt was lost.
    let (found, _) = store.kv.get(Range::Key(key)).await?;
    let own = found.first().filter(|entry| entry.lease == Some(lease));
    Ok(own.map(|entry| entry.create_revision))
}

struct Leader {
    store: Store,
    /// The revision at which the leader's key was created. This agent leads as long as it does not change.
    elected_at: i64,
    state: Option<State>,
    started: Instant,
    /// The run state in the store, and the revision of its key.
    stored: (RunState, i64),
    /// The leases of the agents' keys, which rejections are attached to.
    leases: BTreeMap<String, Option<Lease>>,
    rejections: Vec<(String, u64, Rejection)>,
    watch_from: i64,
}

impl Leader {
    async fn take_over(store: Store, elected_at: i64) -> Result<Leader, SessionError> {
        let (run_state, revision) = store.run_state().await?;
        let (mut agents, now) = store.kv.get(Range::Prefix(store.keys.agents())).await?;
        agents.sort_by_key(|entry| entry.create_revision);
        let stored = (run_state.clone(), revision);
        let mut leader = Leader {
            elected_at,
            state: Some(State::resume(
                run_state,
                LeaseClock::External,
                Duration::ZERO,
            )),
            started: Instant::now(),
            stored,
            leases: BTreeMap::new(),
            rejections: Vec::new(),
            watch_from: now + 1,
            store,
        };
        leader.remove_missing(&agents);
        for entry in agents {
            leader.apply(Change::Put(entry));
        }
        Ok(leader)
    }

    /// Removes the members of the world that have no key, or whose key is another instance's.
    fn remove_missing(&mut self, agents: &[Entry]) {
        let present: BTreeMap<String, Join> = agents
            .iter()
            .filter_map(|entry| Some((self.node(&entry.key)?, self.decode(entry)?)))
            .collect();
        let is_missing = |member: &&crate::NodeInfo| {
            let join = present.get(&member.node);
            !join.is_some_and(|join| join.node_info.is(member))
        };
        let members = self.stored.0.world.iter();
        let missing: Vec<String> = members
            .filter(is_missing)
            .map(|member| member.node.clone())
            .collect();
        for node in missing {
            self.step(Event::Lost { node });
        }
    }

    async fn serve(mut self) -> Result<(), SessionError> {
        let agents = Range::Prefix(self.store.keys.agents());
        let mut changes = self.store.kv.watch(vec![agents], self.watch_from).await?;
        loop {
            self.step(Event::Tick);
            self.write_rejections().await;
            self.write_run_state().await?;
            let wake_at = self.state.as_ref().and_then(State::wake_at);
            let wake_at = wake_at.map(|at| self.started + at);
            let sleep = async {
                match wake_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                next = changes.next() => match next {
                    Some(changes) => changes?.into_iter().for_each(|change| self.apply(change)),
                    None => return Err(SessionError::Disconnected("the watch ended".into())),
                },
                () = sleep => {}
            }
        }
    }

    fn apply(&mut self, change: Change) {
        match change {
            Change::Put(entry) => {
                let (Some(node), Some(join)) = (self.node(&entry.key), self.decode(&entry)) else {
                    return;
                };
                if join.node_info.node != node {
                    return; // a faulty agent signed it for the wrong key
                }
                self.leases.insert(node.clone(), entry.lease);
                let instance = join.node_info.instance;
                if let Some(rejection) = self.step(Event::Join(Box::new(join))) {
                    self.rejections.push((node, instance, rejection));
                }
            }
            Change::Deleted { key } => {
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

    fn decode(&self, entry: &Entry) -> Option<Join> {
        let decoded = self.store.authenticator.verify(&entry.key, &entry.value);
        decoded
            .inspect_err(
                |error| tracing::warn!(key = entry.key, %error, "rejected: invalid agent key"),
            )
            .ok()
    }

    fn step(&mut self, event: Event) -> Option<Rejection> {
        let state = self.state.take()?;
        let step = step(state, event, self.started.elapsed());
        self.state = Some(step.state);
        step.actions.into_iter().find_map(|action| match action {
            Action::Reject(rejection) => Some(rejection),
            _ => None,
        })
    }

    /// The precondition of every write: this agent still leads.
    fn is_leader(&self) -> Compare {
        Compare::CreateRevision(self.store.keys.leader(), self.elected_at)
    }

    async fn write_rejections(&mut self) {
        for (node, instance, rejection) in std::mem::take(&mut self.rejections) {
            let key = self.store.keys.rejection(&node);
            let lease = self.leases.get(&node).copied().flatten();
            let value = self.store.authenticator.sign(&key, &(instance, rejection));
            let put = Put { key, value, lease };
            // This fails if the agent's lease has expired; then no agent waits for the rejection.
            let written = self
                .store
                .kv
                .put_if(vec![self.is_leader()], vec![put])
                .await;
            let _ = written.inspect_err(|error| {
                tracing::warn!(node, %error, "cannot write the rejection of an agent");
            });
        }
    }

    /// Writes the run state in one transaction if it changed. The transaction fails if another agent leads by now.
    async fn write_run_state(&mut self) -> Result<(), KvError> {
        let is_changed = |state: &&State| state.run_state().version != self.stored.0.version;
        let Some(state) = self.state.as_ref().filter(is_changed) else {
            return Ok(());
        };
        let run_state = state.run_state().clone();
        tracing::info!(version = run_state.version, epoch = run_state.epoch.0, phase = ?run_state.phase, "run state");
        let keys = &self.store.keys;
        let is_current = Compare::ModRevision(keys.record(), self.stored.1);
        let lost = self.lost_members(state).into_iter();
        let is_gone = lost.map(|node| Compare::ModRevision(keys.agent(&node), 0));
        let compare = [self.is_leader(), is_current].into_iter().chain(is_gone);
        let put = Put {
            key: keys.record(),
            value: self.store.authenticator.sign(&keys.record(), &run_state),
            lease: None,
        };
        match self.store.kv.put_if(compare.collect(), vec![put]).await? {
            Some(revision) => self.stored = (run_state, revision),
            None => {
                return Err(KvError(
                    "another agent leads, or a lost agent came back".into(),
                ));
            }
        }
        Ok(())
    }

    /// The members of the stored world that the new world does without. Their keys must still be absent when the new
    /// world is stored: an agent that came back in the meantime may have workers.
    fn lost_members(&self, state: &State) -> Vec<String> {
        let stored = &self.stored.0;
        if state.run_state().epoch == stored.epoch {
            return Vec::new();
        }
        stored
            .world
            .iter()
            .filter(|member| state.member(&member.node).is_none())
            .map(|member| member.node.clone())
            .take(MAX_COMPARED)
            .collect()
    }
}
