//! An agent's way to a run in etcd.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

use super::kv::{Change, Compare, Entry, Kv, KvError, Lease, Put, Range};
use super::seal::Seal;
use super::steward::{self, Keys, Store};
use crate::jitter::Jitter;
use crate::seat::{self, Command, Window};
use crate::{
    Attendance, Backend, Decision, Epoch, Join, Phase, Record, Refusal, RendezvousError, Report,
    Seat, Secret,
};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A heartbeat that was not answered is repeated this soon.
const REPEAT_BEAT: Duration = Duration::from_millis(150);

/// The way to a run in a store.
#[derive(Clone)]
pub struct Etcd {
    store: Store,
}

impl Etcd {
    /// A run in this store. Asks nothing of it yet.
    pub fn new(kv: Arc<dyn Kv>, run: &str, secret: &Secret) -> Etcd {
        Etcd {
            store: Store {
                kv,
                seal: Seal::new(secret, run),
                keys: Keys::new(run),
                run: run.to_owned(),
            },
        }
    }
}

#[async_trait]
impl Backend for Etcd {
    async fn join(&self, join: Join) -> Result<Arc<dyn Seat>, RendezvousError> {
        join.check(&Record::new(&self.store.run))?;
        let now = Instant::now();
        let instance = join.advert.instance;
        let attend = |inbox, window| {
            let attendant = Attendant {
                store: self.store.clone(),
                attendance: Attendance::new(join.policy.lease),
                join,
                started: now,
                session: None,
                opening: None,
                beat: None,
                saying: None,
                has_more_to_say: false,
                stewardship: None,
                try_stewardship_at: now,
                has_steward_gone: false,
                jitter: Jitter::new(instance),
                pause: FIRST_PAUSE,
                retry_at: now,
                trouble: "no answer yet".into(),
                was_in: false,
                gathers_since: None,
                window,
            };
            tokio::spawn(attendant.run(inbox)).abort_handle()
        };
        seat::take(attend).await
    }
}

/// A task that ends with whoever holds it.
struct Task<T>(JoinHandle<T>);

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What a task that may be there comes to; never, where none is.
async fn ended<T>(task: &mut Option<Task<T>>) -> T {
    match task {
        Some(running) => match (&mut running.0).await {
            Ok(value) => value,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => std::future::pending().await, // the runtime ends
        },
        None => std::future::pending().await,
    }
}

/// Keeps the agent's key, its lease and its view of the record; and decides for all where nobody else does.
struct Attendant {
    store: Store,
    join: Join,
    attendance: Attendance,
    started: Instant,
    session: Option<Session>,
    opening: Option<Task<Result<Session, Failure>>>,
    beat: Option<Task<(Duration, Result<bool, KvError>)>>,
    saying: Option<Task<Result<Option<i64>, KvError>>>,
    has_more_to_say: bool,
    stewardship: Option<Task<Result<(), KvError>>>,
    try_stewardship_at: Instant,
    /// The steward's key went since that was last tried: what comes of the attempt may be out of date.
    has_steward_gone: bool,
    jitter: Jitter,
    pause: Duration,
    retry_at: Instant,
    /// What went wrong last.
    trouble: String,
    was_in: bool,
    /// Since when workers of the last world are to be stopped.
    gathers_since: Option<Instant>,
    window: Window,
}

/// A key that is held, and a record that is watched.
struct Session {
    lease: Lease,
    /// When the lease was asked for.
    sent: Duration,
    /// The revision of the agent's own key.
    own: i64,
    record: Record,
    changes: BoxStream<'static, Result<Vec<Change>, KvError>>,
}

enum Failure {
    Store(KvError),
    Refused(Refusal),
}

impl From<KvError> for Failure {
    fn from(error: KvError) -> Failure {
        Failure::Store(error)
    }
}

impl Attendant {
    async fn run(mut self, mut inbox: mpsc::Receiver<Command>) {
        if let Err(error) = self.attend(&mut inbox).await {
            self.window.fail(error);
        }
    }

    async fn attend(&mut self, inbox: &mut mpsc::Receiver<Command>) -> Result<(), RendezvousError> {
        loop {
            self.begin_what_is_due();
            let wake = self.wake_at();
            tokio::select! {
                biased;
                changes = next_changes(&mut self.session) => self.see(changes)?,
                opened = ended(&mut self.opening) => self.opened(opened)?,
                (sent, alive) = ended(&mut self.beat) => self.beaten(sent, alive),
                said = ended(&mut self.saying) => self.said(said),
                decided = ended(&mut self.stewardship) => self.decided(decided),
                command = inbox.recv() => match command {
                    Some(Command::Heartbeat) => self.heartbeat(),
                    Some(Command::Report(epoch, report)) => self.report(epoch, report),
                    Some(Command::Leave) => return self.leave().await,
                    None => return Ok(()),
                },
                () = sleep_until(wake) => {}
            }
            if Instant::now() >= self.gives_up_at() {
                return Err(RendezvousError::Unreachable {
                    endpoint: self.store.kv.describe(),
                    cause: self.trouble.clone(),
                });
            }
            self.show();
        }
    }

    fn begin_what_is_due(&mut self) {
        let now = Instant::now();
        if self.wants_session() && now >= self.retry_at {
            self.join.seen = self.join.seen.max(self.attendance.seen());
            let opening = open(self.store.clone(), self.join.clone(), self.started);
            self.opening = Some(Task(tokio::spawn(opening)));
        }
        if let Some(session) = &self.session
            && self.stewardship.is_none()
            && now >= self.try_stewardship_at
            && !matches!(session.record.phase, Phase::Closed(_))
        {
            self.has_steward_gone = false;
            let stewardship = steward::decide(self.store.clone(), session.lease);
            self.stewardship = Some(Task(tokio::spawn(stewardship)));
        }
    }

    /// An agent that hangs does not come back.
    fn wants_session(&self) -> bool {
        let hangs = self.attendance.hangs(self.started.elapsed());
        self.session.is_none() && self.opening.is_none() && !hangs
    }

    fn gives_up_at(&self) -> Instant {
        let patience = self.join.policy.join_timeout;
        self.started + self.attendance.gives_up_at(patience)
    }

    fn wake_at(&self) -> Instant {
        let now = Instant::now();
        let lapse = self.attendance.lapses_at().map(|at| self.started + at);
        let times = [
            lapse.filter(|&at| at > now),
            self.wants_session().then_some(self.retry_at),
            (self.session.is_some() && self.stewardship.is_none())
                .then_some(self.try_stewardship_at),
            Some(self.gives_up_at()),
        ];
        times
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(now + LONGEST_PAUSE)
    }

    fn opened(&mut self, opened: Result<Session, Failure>) -> Result<(), RendezvousError> {
        self.opening = None;
        match opened {
            Ok(session) => {
                self.pause = FIRST_PAUSE;
                self.was_in = true;
                self.attendance
                    .renewed(session.sent, session.record.version);
                self.try_stewardship_at = Instant::now();
                let record = session.record.clone();
                self.session = Some(session);
                self.told(record);
                if std::mem::take(&mut self.has_more_to_say) {
                    self.say();
                }
                Ok(())
            }
            Err(Failure::Store(error)) => {
                self.broken(error.to_string());
                Ok(())
            }
            Err(Failure::Refused(Refusal::Closed(how))) => {
                self.was_in = true;
                let version = self.attendance.version().unwrap_or(0);
                self.attendance
                    .told(version.saturating_add(1), Decision::Close(how));
                self.retry_at = Instant::now() + Duration::from_secs(3600);
                Ok(())
            }
            Err(Failure::Refused(refusal)) if refusal.passes() => {
                self.broken(refusal.to_string());
                Ok(())
            }
            Err(Failure::Refused(refusal)) => Err(refusal.into()),
        }
    }

    /// The next attempt comes later, and not at the same moment as everybody else's.
    fn broken(&mut self, cause: String) {
        tracing::warn!(store = self.store.kv.describe(), cause, "rendezvous");
        (self.session, self.stewardship, self.saying, self.beat) = (None, None, None, None);
        self.trouble = cause;
        self.retry_at = Instant::now() + self.jitter.around(self.pause);
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
    }

    fn see(&mut self, changes: Result<Vec<Change>, KvError>) -> Result<(), RendezvousError> {
        let changes = match changes {
            Ok(changes) => changes,
            Err(error) => {
                self.broken(error.to_string());
                return Ok(());
            }
        };
        let (record, steward) = (self.store.keys.record(), self.store.keys.steward());
        let refusal = self.store.keys.refusal(&self.join.advert.node);
        for change in changes {
            match change {
                Change::Put(entry) if entry.key == record => self.see_record(&entry),
                Change::Put(entry) if entry.key == refusal => self.see_refusal(&entry)?,
                Change::Gone { key } if key == steward => {
                    self.has_steward_gone = true;
                    self.try_stewardship_at =
                        Instant::now() + self.jitter.around(Duration::from_millis(20));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn see_record(&mut self, entry: &Entry) {
        match self.store.open_record(entry) {
            Ok(record) => self.told(record),
            Err(error) => tracing::warn!(%error, "ignored"),
        }
    }

    fn told(&mut self, record: Record) {
        let decision = record.decision_for(&self.join.advert);
        self.attendance.told(record.version, decision);
        let gathers = matches!(record.phase, Phase::Gathering(_));
        let since = self.gathers_since.unwrap_or_else(Instant::now);
        self.gathers_since = gathers.then_some(since);
        if let Some(session) = &mut self.session {
            session.record = record;
        }
    }

    fn see_refusal(&mut self, entry: &Entry) -> Result<(), RendezvousError> {
        let opened = self
            .store
            .seal
            .open::<(u64, Refusal)>(&entry.key, &entry.value);
        match opened {
            Ok((instance, refusal)) if instance == self.join.advert.instance => {
                if !refusal.passes() && !matches!(refusal, Refusal::Closed(_)) {
                    return Err(refusal.into());
                }
                self.broken(refusal.to_string());
            }
            Ok(_) => {}
            Err(cause) => tracing::warn!(key = entry.key, cause, "ignored"),
        }
        Ok(())
    }

    fn heartbeat(&mut self) {
        self.attendance.asked(self.started.elapsed());
        if self.beat.is_none() && !self.is_late() {
            self.beat_in(Duration::ZERO);
        }
    }

    /// Whether workers should have been stopped by now: then the others go on when the lease is over, by which
    /// they have been killed.
    fn is_late(&self) -> bool {
        let limit = self.join.policy.stop_within;
        let is_over = |since: Instant| since.elapsed() >= limit;
        self.attendance.may_work() && self.gathers_since.is_some_and(is_over)
    }

    fn beat_in(&mut self, pause: Duration) {
        let Some(session) = &self.session else {
            return;
        };
        let (kv, lease, started) = (Arc::clone(&self.store.kv), session.lease, self.started);
        self.beat = Some(Task(tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            let sent = started.elapsed();
            (sent, kv.keep_alive(lease).await)
        })));
    }

    fn beaten(&mut self, sent: Duration, alive: Result<bool, KvError>) {
        self.beat = None;
        match alive {
            Ok(true) => {
                let version = self
                    .session
                    .as_ref()
                    .map_or(0, |session| session.record.version);
                self.attendance.renewed(sent, version);
            }
            Ok(false) => {
                self.broken("the lease is over".into());
                self.retry_at = Instant::now();
            }
            Err(error) => {
                self.trouble = error.to_string();
                self.beat_in(REPEAT_BEAT);
            }
        }
    }

    fn report(&mut self, epoch: Epoch, report: Report) {
        if report == Report::Stopped {
            self.attendance.stopped(epoch);
        }
        self.join.said = Some((epoch, report));
        self.say();
    }

    /// Writes the agent's key again. One write after another, each naming the one before it.
    fn say(&mut self) {
        let (Some(session), None) = (&self.session, &self.saying) else {
            self.has_more_to_say = self.session.is_some() || self.opening.is_some();
            return; // with the next session, or after this write
        };
        let key = self.store.keys.agent(&self.join.advert.node);
        let put = Put {
            value: self.store.seal.close(&key, &self.join),
            lease: Some(session.lease),
            key: key.clone(),
        };
        let (kv, compare) = (
            Arc::clone(&self.store.kv),
            Compare::Modified(key, session.own),
        );
        self.has_more_to_say = false;
        self.saying = Some(Task(tokio::spawn(async move {
            kv.put_if(vec![compare], vec![put]).await
        })));
    }

    fn said(&mut self, said: Result<Option<i64>, KvError>) {
        self.saying = None;
        match (said, &mut self.session) {
            (Ok(Some(revision)), Some(session)) => {
                session.own = revision;
                if self.has_more_to_say {
                    self.say();
                }
            }
            (Ok(None), _) => {
                self.broken("somebody wrote this agent's key, or its lease is over".into())
            }
            (Err(error), _) => self.broken(error.to_string()),
            (Ok(Some(_)), None) => {}
        }
    }

    fn decided(&mut self, decided: Result<(), KvError>) {
        self.stewardship = None;
        let pause = match decided {
            Ok(()) if self.has_steward_gone => Duration::ZERO,
            Ok(()) => Duration::from_secs(30), // or when the steward's key is gone
            Err(error) => {
                tracing::warn!(%error, "stewardship");
                Duration::from_millis(300)
            }
        };
        self.try_stewardship_at = Instant::now() + self.jitter.around(pause);
    }

    async fn leave(&mut self) -> Result<(), RendezvousError> {
        self.stewardship = None;
        if let Some(session) = self.session.take() {
            // If it is not heard the lease ends by itself.
            let _ = timeout(Duration::from_secs(1), self.store.kv.revoke(session.lease)).await;
        }
        Err(RendezvousError::Left)
    }

    /// The agent is shown what is new, once it is in.
    fn show(&mut self) {
        if !self.was_in {
            return;
        }
        let decision = self.attendance.decide(self.started.elapsed());
        self.window.show(decision);
    }
}

/// Takes the agent's key with a new lease, then reads the record and watches it.
async fn open(store: Store, join: Join, started: Instant) -> Result<Session, Failure> {
    let (record, _) = store.record().await?;
    if let Phase::Closed(how) = &record.phase {
        return Err(Failure::Refused(Refusal::Closed(how.clone())));
    }
    join.check(&record).map_err(Failure::Refused)?;
    let sent = started.elapsed();
    let lease = store.kv.grant(join.policy.lease).await?;
    let own = take_key(&store, &join, lease).await?;
    let keys = &store.keys;
    let (found, now) = store.kv.get(Range::Key(keys.record())).await?;
    let record = match found.first() {
        Some(entry) => store.open_record(entry)?,
        None => record,
    };
    let ranges = [
        keys.record(),
        keys.refusal(&join.advert.node),
        keys.steward(),
    ];
    let ranges = ranges.into_iter().map(Range::Key).collect();
    let changes = store.kv.watch(ranges, now + 1).await?;
    Ok(Session {
        lease,
        sent,
        own,
        record,
        changes,
    })
}

/// A key that another agent of the same name holds is not touched.
async fn take_key(store: &Store, join: &Join, lease: Lease) -> Result<i64, Failure> {
    let key = store.keys.agent(&join.advert.node);
    let (found, _) = store.kv.get(Range::Key(key.clone())).await?;
    let before = match found.first() {
        Some(entry) => {
            let holder = store.seal.open::<Join>(&entry.key, &entry.value);
            if holder.is_ok_and(|holder| holder.advert.instance != join.advert.instance) {
                let node = join.advert.node.clone();
                return Err(Failure::Refused(Refusal::NameTaken { node }));
            }
            entry.modified
        }
        None => 0,
    };
    let put = Put {
        value: store.seal.close(&key, join),
        lease: Some(lease),
        key: key.clone(),
    };
    let taken = store
        .kv
        .put_if(vec![Compare::Modified(key, before)], vec![put])
        .await?;
    taken.ok_or_else(|| KvError("this agent's key was written by somebody else".into()).into())
}

/// The next changes, or why there are none; never, where there is no session.
async fn next_changes(session: &mut Option<Session>) -> Result<Vec<Change>, KvError> {
    match session {
        Some(session) => match session.changes.next().await {
            Some(changes) => changes,
            None => Err(KvError("the watch ended".into())),
        },
        None => std::future::pending().await,
    }
}
