//! The session of an agent over etcd.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use tokio::time::{Instant, timeout};

use super::authenticator::Authenticator;
use super::kv::{Change, Compare, Entry, Kv, KvError, Lease, Put, Range};
use super::leader::lead;
use super::store::{Keys, Store};
use crate::jitter::Jitter;
use crate::membership::spawn_session;
use crate::session::{SessionConfig, SessionError, Task, Transport, completed};
use crate::{
    Backend, Epoch, Join, LeaseTracker, Membership, Phase, Rejection, RendezvousError, Report,
    RunSecret, RunState,
};

/// The delay before a failed heartbeat is repeated.
const HEARTBEAT_RETRY_DELAY: Duration = Duration::from_millis(150);
/// The delay between the loss of a leader and a campaign, which spreads the campaigns of the agents.
const CAMPAIGN_DELAY: Duration = Duration::from_millis(20);
/// The delay before another campaign after leadership ended with an error.
const CAMPAIGN_RETRY_DELAY: Duration = Duration::from_millis(300);
/// The interval of campaigns while another agent leads, in case the loss of its key was missed.
const CAMPAIGN_INTERVAL: Duration = Duration::from_secs(30);
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// A rendezvous in etcd.
#[derive(Clone)]
pub struct Etcd {
    store: Store,
}

impl Etcd {
    /// The rendezvous of a run in a store. Sends nothing yet.
    pub fn new(kv: Arc<dyn Kv>, run: &str, secret: &RunSecret) -> Etcd {
        Etcd {
            store: Store {
                kv,
                authenticator: Authenticator::new(secret, run),
                keys: Keys::new(run),
                run: run.to_owned(),
            },
        }
    }
}

#[async_trait]
impl Backend for Etcd {
    async fn join(&self, join: Join) -> Result<Arc<dyn Membership>, RendezvousError> {
        join.check(&RunState::new(&self.store.run))?;
        let config = SessionConfig::new(self.store.kv.describe(), &join);
        let session = EtcdSession {
            store: self.store.clone(),
            tracker: LeaseTracker::new(join.policy.lease),
            jitter: config.jitter.clone(),
            join,
            started: config.started,
            connection: None,
            heartbeat: None,
            write: None,
            needs_write: false,
            leadership: None,
            campaign_at: config.started,
            is_leader_lost: false,
            joining_since: None,
        };
        spawn_session(config, session).await
    }
}

/// Keeps the agent's key, its lease and its view of the run state, and leads the run while no other agent does.
struct EtcdSession {
    store: Store,
    join: Join,
    tracker: LeaseTracker,
    started: Instant,
    connection: Option<Connection>,
    heartbeat: Option<Task<(Duration, Result<bool, KvError>)>>,
    /// A write of the agent's key. Only one is in flight, because each names the revision of the one before.
    write: Option<Task<Result<Option<i64>, KvError>>>,
    /// The join has changed since the last write of the agent's key began.
    needs_write: bool,
    leadership: Option<Task<Result<(), SessionError>>>,
    campaign_at: Instant,
    /// The leader's key was deleted after the last campaign began, so the result of that campaign may be outdated.
    is_leader_lost: bool,
    jitter: Jitter,
    /// Since when the workers of the last world must be stopped.
    joining_since: Option<Instant>,
}

/// A key that this agent holds, and a watch of the run state.
struct Connection {
    lease: Lease,
    /// When the lease was requested.
    sent: Duration,
    /// The revision of the agent's own key.
    revision: i64,
    run_state: RunState,
    changes: BoxStream<'static, Result<Vec<Change>, KvError>>,
}

enum EtcdEvent {
    Changes(Result<Vec<Change>, KvError>),
    Heartbeat(Duration, Result<bool, KvError>),
    Written(Result<Option<i64>, KvError>),
    LeadershipEnded(Result<(), SessionError>),
}

impl From<KvError> for SessionError {
    fn from(error: KvError) -> SessionError {
        SessionError::Disconnected(error.to_string())
    }
}

impl Transport for EtcdSession {
    const MIN_BACKOFF: Duration = Duration::from_millis(100);
    type Connection = Connection;
    type Event = EtcdEvent;

    fn tracker(&mut self) -> &mut LeaseTracker {
        &mut self.tracker
    }

    fn connect(
        &mut self,
    ) -> impl Future<Output = Result<Connection, SessionError>> + Send + 'static {
        self.join.watermark = self.join.watermark.max(self.tracker.watermark());
        self.needs_write = false;
        connect(self.store.clone(), self.join.clone(), self.started)
    }

    fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    fn on_connected(&mut self, connection: Connection) -> Result<(), SessionError> {
        let run_state = connection.run_state.clone();
        self.tracker.renew(connection.sent, run_state.version);
        self.campaign_at = Instant::now();
        self.connection = Some(connection);
        self.on_run_state(run_state);
        if self.needs_write {
            self.write_key();
        }
        Ok(())
    }

    fn on_disconnected(&mut self) {
        (self.connection, self.leadership) = (None, None);
        (self.write, self.heartbeat) = (None, None);
    }

    async fn next_event(&mut self) -> EtcdEvent {
        tokio::select! {
            biased;
            changes = next_changes(&mut self.connection) => EtcdEvent::Changes(changes),
            (sent, alive) = completed(&mut self.heartbeat) => EtcdEvent::Heartbeat(sent, alive),
            written = completed(&mut self.write) => EtcdEvent::Written(written),
            ended = completed(&mut self.leadership) => EtcdEvent::LeadershipEnded(ended),
        }
    }

    fn handle_event(&mut self, event: EtcdEvent) -> Result<(), SessionError> {
        match event {
            EtcdEvent::Changes(changes) => {
                let mut changes = changes?.into_iter();
                changes.try_for_each(|change| self.on_change(change))
            }
            EtcdEvent::Heartbeat(sent, alive) => self.on_heartbeat(sent, alive),
            EtcdEvent::Written(written) => self.on_written(written),
            EtcdEvent::LeadershipEnded(ended) => {
                self.on_leadership_ended(ended);
                Ok(())
            }
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        self.can_campaign().then_some(self.campaign_at)
    }

    fn on_timer(&mut self, now: Instant) -> Result<(), SessionError> {
        if self.can_campaign()
            && now >= self.campaign_at
            && let Some(connection) = &self.connection
        {
            self.is_leader_lost = false;
            self.leadership = Some(Task::spawn(lead(self.store.clone(), connection.lease)));
        }
        Ok(())
    }

    fn heartbeat(&mut self) -> Result<(), SessionError> {
        if self.heartbeat.is_none() && !self.is_past_stop_deadline() {
            self.send_heartbeat(Duration::ZERO);
        }
        Ok(())
    }

    fn report(&mut self, epoch: Epoch, report: Report) -> Result<(), SessionError> {
        if report == Report::Stopped {
            self.tracker.on_stopped(epoch);
        }
        self.join.last_report = Some((epoch, report));
        self.write_key();
        Ok(())
    }

    async fn leave(&mut self) {
        self.leadership = None;
        if let Some(connection) = self.connection.take() {
            // If this fails the lease expires by itself.
            let _ = timeout(LEAVE_TIMEOUT, self.store.kv.revoke(connection.lease)).await;
        }
    }
}

impl EtcdSession {
    fn can_campaign(&self) -> bool {
        let is_open =
            |connection: &Connection| !matches!(connection.run_state.phase, Phase::Closed(_));
        self.leadership.is_none() && self.connection.as_ref().is_some_and(is_open)
    }

    fn on_change(&mut self, change: Change) -> Result<(), SessionError> {
        let keys = &self.store.keys;
        match change {
            Change::Put(entry) if entry.key == keys.record() => self.on_record(&entry),
            Change::Put(entry) if entry.key == keys.rejection(&self.join.node_info.node) => {
                self.on_rejection(&entry)
            }
            Change::Deleted { key } if key == keys.leader() => {
                self.is_leader_lost = true;
                self.campaign_at = Instant::now() + self.jitter.around(CAMPAIGN_DELAY);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn on_record(&mut self, entry: &Entry) -> Result<(), SessionError> {
        match self.store.decode_run_state(entry) {
            Ok(run_state) => self.on_run_state(run_state),
            Err(error @ SessionError::Fatal(_)) => return Err(error),
            Err(error) => tracing::warn!(%error, "rejected: invalid run state"),
        }
        Ok(())
    }

    fn on_run_state(&mut self, run_state: RunState) {
        let decision = run_state.decision_for(&self.join.node_info);
        self.tracker.on_decision(run_state.version, decision);
        let is_joining = matches!(run_state.phase, Phase::Joining(_));
        let since = self.joining_since.unwrap_or_else(Instant::now);
        self.joining_since = is_joining.then_some(since);
        if let Some(connection) = &mut self.connection {
            connection.run_state = run_state;
        }
    }

    fn on_rejection(&mut self, entry: &Entry) -> Result<(), SessionError> {
        let authenticator = &self.store.authenticator;
        match authenticator.verify::<(u64, Rejection)>(&entry.key, &entry.value) {
            Ok((instance, rejection)) if instance == self.join.node_info.instance => {
                return Err(SessionError::Rejected(rejection));
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(key = entry.key, %error, "rejected: invalid rejection"),
        }
        Ok(())
    }

    /// Whether the workers should have been stopped by now. The agent then lets its lease expire, by which time it
    /// has killed them, and the others go on without it.
    fn is_past_stop_deadline(&self) -> bool {
        let limit = self.join.policy.stop_timeout;
        let is_over = |since: Instant| since.elapsed() >= limit;
        self.tracker.may_run_workers() && self.joining_since.is_some_and(is_over)
    }

    fn send_heartbeat(&mut self, delay: Duration) {
        let Some(connection) = &self.connection else {
            return;
        };
        let (kv, lease, started) = (Arc::clone(&self.store.kv), connection.lease, self.started);
        self.heartbeat = Some(Task::spawn(async move {
            tokio::time::sleep(delay).await;
            let sent = started.elapsed();
            (sent, kv.keep_alive(lease).await)
        }));
    }

    fn on_heartbeat(
        &mut self,
        sent: Duration,
        alive: Result<bool, KvError>,
    ) -> Result<(), SessionError> {
        self.heartbeat = None;
        match alive {
            Ok(true) => {
                let connection = self.connection.as_ref();
                let version = connection.map_or(0, |connection| connection.run_state.version);
                self.tracker.renew(sent, version);
                Ok(())
            }
            Ok(false) => Err(SessionError::LeaseExpired),
            Err(error) => {
                self.send_heartbeat(HEARTBEAT_RETRY_DELAY);
                Err(SessionError::Transient(error.to_string()))
            }
        }
    }

    /// Writes the join under the agent's key again, now, after the write in flight, or with the next connection.
    fn write_key(&mut self) {
        let (Some(connection), None) = (&self.connection, &self.write) else {
            self.needs_write = true;
            return;
        };
        self.needs_write = false;
        let key = self.store.keys.agent(&self.join.node_info.node);
        let put = Put {
            value: self.store.authenticator.sign(&key, &self.join),
            lease: Some(connection.lease),
            key: key.clone(),
        };
        let compare = Compare::ModRevision(key, connection.revision);
        let kv = Arc::clone(&self.store.kv);
        self.write = Some(Task::spawn(async move {
            kv.put_if(vec![compare], vec![put]).await
        }));
    }

    fn on_written(&mut self, written: Result<Option<i64>, KvError>) -> Result<(), SessionError> {
        self.write = None;
        let Some(revision) = written? else {
            let cause = "another client wrote this agent's key, or the lease expired";
            return Err(SessionError::Disconnected(cause.into()));
        };
        if let Some(connection) = &mut self.connection {
            connection.revision = revision;
        }
        if self.needs_write {
            self.write_key();
        }
        Ok(())
    }

    fn on_leadership_ended(&mut self, ended: Result<(), SessionError>) {
        self.leadership = None;
        let delay = match ended {
            Ok(()) if self.is_leader_lost => Duration::ZERO,
            Ok(()) => CAMPAIGN_INTERVAL,
            Err(error) => {
                tracing::warn!(%error, "lost leadership");
                CAMPAIGN_RETRY_DELAY
            }
        };
        self.campaign_at = Instant::now() + self.jitter.around(delay);
    }
}

/// Writes the agent's key with a new lease, then reads the run state and watches it.
async fn connect(store: Store, join: Join, started: Instant) -> Result<Connection, SessionError> {
    let (run_state, _) = store.run_state().await?;
    if let Phase::Closed(outcome) = &run_state.phase {
        return Err(SessionError::Rejected(Rejection::Closed(outcome.clone())));
    }
    join.check(&run_state).map_err(SessionError::Rejected)?;
    let sent = started.elapsed();
    let lease = store.kv.grant(join.policy.lease).await?;
    let revision = take_key(&store, &join, lease).await?;
    let keys = &store.keys;
    let (found, now) = store.kv.get(Range::Key(keys.record())).await?;
    let run_state = match found.first() {
        Some(entry) => store.decode_run_state(entry)?,
        None => run_state,
    };
    let watched = [
        keys.record(),
        keys.rejection(&join.node_info.node),
        keys.leader(),
    ];
    let ranges = watched.into_iter().map(Range::Key).collect();
    let changes = store.kv.watch(ranges, now + 1).await?;
    Ok(Connection {
        lease,
        sent,
        revision,
        run_state,
        changes,
    })
}

/// Takes the key of the agent's node, unless another agent of the same name holds it.
async fn take_key(store: &Store, join: &Join, lease: Lease) -> Result<i64, SessionError> {
    let key = store.keys.agent(&join.node_info.node);
    let (found, _) = store.kv.get(Range::Key(key.clone())).await?;
    let revision = match found.first() {
        Some(entry) => {
            let other = store.authenticator.verify::<Join>(&entry.key, &entry.value);
            let instance = join.node_info.instance;
            if other.is_ok_and(|other| other.node_info.instance != instance) {
                let node = join.node_info.node.clone();
                return Err(SessionError::Rejected(Rejection::NameTaken { node }));
            }
            entry.mod_revision
        }
        None => 0,
    };
    let put = Put {
        value: store.authenticator.sign(&key, join),
        lease: Some(lease),
        key: key.clone(),
    };
    let compare = Compare::ModRevision(key, revision);
    let written = store.kv.put_if(vec![compare], vec![put]).await?;
    written.ok_or_else(|| {
        SessionError::Disconnected("another client wrote this agent's key at the same time".into())
    })
}

/// The next changes, or the error that ended the watch; waits forever without a connection.
async fn next_changes(connection: &mut Option<Connection>) -> Result<Vec<Change>, KvError> {
    match connection {
        Some(connection) => match connection.changes.next().await {
            Some(changes) => changes,
            None => Err(KvError("the watch ended".into())),
        },
        None => std::future::pending().await,
    }
}
