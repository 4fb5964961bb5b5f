//! The session of an agent, whichever backend carries it: connects, reconnects with backoff, executes the agent's
//! commands, publishes decisions, and gives up at the join deadline.

use std::future::Future;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::jitter::Jitter;
use crate::membership::{Command, DecisionSender};
use crate::{Decision, Epoch, Join, LeaseTracker, Rejection, RendezvousError, Report};

const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// What a backend adds to a session: how it connects, and what it exchanges over a connection.
///
/// All times of the [`LeaseTracker`] count from [`SessionConfig::started`].
pub trait Transport: Send + 'static {
    /// The delay before the first reconnect; it doubles with every further attempt.
    const MIN_BACKOFF: Duration;
    /// An open connection.
    type Connection: Send + 'static;
    /// Something that arrived on the connection, or that a task of the transport completed.
    type Event: Send;

    /// The agent's lease and its newest decision.
    fn tracker(&mut self) -> &mut LeaseTracker;

    /// Opens a connection. The driver runs this in a task, because the lease can expire meanwhile.
    fn connect(
        &mut self,
    ) -> impl Future<Output = Result<Self::Connection, SessionError>> + Send + 'static;
    /// Whether there is a connection.
    fn is_connected(&self) -> bool;
    /// Takes a new connection.
    fn on_connected(&mut self, connection: Self::Connection) -> Result<(), SessionError>;
    /// Drops the connection and everything that depends on it.
    fn on_disconnected(&mut self);

    /// Waits for the next event; forever without a connection. It must be safe to drop the future.
    fn next_event(&mut self) -> impl Future<Output = Self::Event> + Send;
    /// Handles an event.
    fn handle_event(&mut self, event: Self::Event) -> Result<(), SessionError>;

    /// When [`Transport::on_timer`] has something to do; it is also called at other times.
    fn wake_at(&self) -> Option<Instant>;
    /// Does what is due.
    fn on_timer(&mut self, now: Instant) -> Result<(), SessionError>;

    /// Renews the lease, without waiting for the response.
    fn heartbeat(&mut self) -> Result<(), SessionError>;
    /// Reports the state of the workers of an epoch, now or with the next connection.
    fn report(&mut self, epoch: Epoch, report: Report) -> Result<(), SessionError>;
    /// Leaves the run, and waits at most about a second for the response.
    fn leave(&mut self) -> impl Future<Output = ()> + Send;
}

/// What can go wrong in a session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// A request failed. The connection lasts, and the transport repeats the request.
    #[error("{0}")]
    Transient(String),
    /// The connection failed: reconnect after a backoff.
    #[error("{0}")]
    Disconnected(String),
    /// The lease expired: reconnect at once to get a new one.
    #[error("the lease expired")]
    LeaseExpired,
    /// The run rejected the agent.
    #[error(transparent)]
    Rejected(Rejection),
    /// Reconnecting cannot help.
    #[error(transparent)]
    Fatal(RendezvousError),
}

/// What every session needs to know, whichever transport it uses.
pub struct SessionConfig {
    /// The address of the rendezvous, for error messages.
    pub endpoint: String,
    pub started: Instant,
    pub join_timeout: Duration,
    pub jitter: Jitter,
}

impl SessionConfig {
    pub fn new(endpoint: String, join: &Join) -> SessionConfig {
        SessionConfig {
            endpoint,
            started: Instant::now(),
            join_timeout: join.policy.join_timeout,
            jitter: Jitter::new(join.node_info.instance),
        }
    }
}

/// Runs the session of an agent until it leaves, its handle is dropped, or an error ends it.
pub async fn drive<T: Transport>(
    config: SessionConfig,
    transport: T,
    mut commands: mpsc::Receiver<Command>,
    decisions: DecisionSender,
) {
    let mut driver = Driver {
        connecting: None,
        backoff: T::MIN_BACKOFF,
        retry_at: config.started,
        last_error: "no response yet".into(),
        config,
        transport,
        decisions,
    };
    if let Err(error) = driver.run(&mut commands).await {
        driver.decisions.fail(error);
    }
}

struct Driver<T: Transport> {
    config: SessionConfig,
    transport: T,
    connecting: Option<Task<Result<T::Connection, SessionError>>>,
    backoff: Duration,
    retry_at: Instant,
    last_error: String,
    decisions: DecisionSender,
}

impl<T: Transport> Driver<T> {
    async fn run(&mut self, commands: &mut mpsc::Receiver<Command>) -> Result<(), RendezvousError> {
        loop {
            self.start_due_work()?;
            let wake_at = self.wake_at();
            tokio::select! {
                biased;
                event = self.transport.next_event() => {
                    let handled = self.transport.handle_event(event);
                    self.handle(handled)?;
                }
                connected = completed(&mut self.connecting) => self.on_connected(connected)?,
                command = commands.recv() => match command {
                    Some(Command::Leave) => {
                        self.transport.leave().await;
                        return Err(RendezvousError::Left);
                    }
                    Some(command) => self.execute(command)?,
                    None => return Ok(()),
                },
                () = sleep_until(wake_at) => {}
            }
            if Instant::now() >= self.join_deadline() {
                return Err(RendezvousError::Unreachable {
                    endpoint: self.config.endpoint.clone(),
                    cause: self.last_error.clone(),
                });
            }
            self.publish();
        }
    }

    fn now(&self) -> Duration {
        self.config.started.elapsed()
    }

    fn join_deadline(&mut self) -> Instant {
        let timeout = self.config.join_timeout;
        self.config.started + self.transport.tracker().join_deadline(timeout)
    }

    /// A stalled agent does not reconnect, because its rank is free for others; nor does one whose run has ended.
    fn needs_connection(&mut self) -> bool {
        let now = self.now();
        let is_connected = self.transport.is_connected() || self.connecting.is_some();
        let tracker = self.transport.tracker();
        !is_connected && !tracker.is_closed() && !tracker.is_stalled(now)
    }

    fn start_due_work(&mut self) -> Result<(), RendezvousError> {
        let now = Instant::now();
        if self.needs_connection() && now >= self.retry_at {
            self.connecting = Some(Task::spawn(self.transport.connect()));
        }
        let handled = self.transport.on_timer(now);
        self.handle(handled)
    }

    fn wake_at(&mut self) -> Instant {
        let started = self.config.started;
        let expires_at = self.transport.tracker().expires_at().map(|at| started + at);
        let times = [
            expires_at.filter(|&at| at > Instant::now()),
            self.needs_connection().then_some(self.retry_at),
            self.transport.wake_at(),
        ];
        let times = times.into_iter().flatten();
        times.fold(self.join_deadline(), Instant::min)
    }

    fn on_connected(
        &mut self,
        connected: Result<T::Connection, SessionError>,
    ) -> Result<(), RendezvousError> {
        self.connecting = None;
        let handled = connected.and_then(|connection| {
            self.backoff = T::MIN_BACKOFF;
            self.transport.on_connected(connection)
        });
        self.handle(handled)
    }

    fn execute(&mut self, command: Command) -> Result<(), RendezvousError> {
        let handled = match command {
            Command::Heartbeat => {
                let now = self.now();
                self.transport.tracker().on_heartbeat(now);
                self.transport.heartbeat()
            }
            Command::Report(epoch, report) => self.transport.report(epoch, report),
            Command::Leave => Ok(()),
        };
        self.handle(handled)
    }

    /// Returns an error only if it ends the session.
    fn handle(&mut self, handled: Result<(), SessionError>) -> Result<(), RendezvousError> {
        match handled {
            Ok(()) => {}
            Err(SessionError::Transient(cause)) => self.last_error = cause,
            Err(SessionError::Disconnected(cause)) => self.reconnect(cause),
            Err(SessionError::LeaseExpired) => {
                self.reconnect("the lease expired".into());
                self.retry_at = Instant::now();
            }
            Err(SessionError::Rejected(Rejection::Closed(outcome))) => {
                self.transport.on_disconnected();
                self.transport.tracker().on_closed(outcome);
            }
            Err(SessionError::Rejected(rejection)) if rejection.is_retryable() => {
                self.reconnect(rejection.to_string());
            }
            Err(SessionError::Rejected(rejection)) => return Err(rejection.into()),
            Err(SessionError::Fatal(error)) => return Err(error),
        }
        Ok(())
    }

    /// Schedules the next attempt: later than the last one, and not at the same moment as the other agents.
    fn reconnect(&mut self, cause: String) {
        tracing::warn!(
            endpoint = self.config.endpoint,
            cause,
            "lost the connection to the rendezvous"
        );
        self.transport.on_disconnected();
        self.last_error = cause;
        self.retry_at = Instant::now() + self.config.jitter.around(self.backoff);
        self.backoff = (2 * self.backoff).min(MAX_BACKOFF);
    }

    /// Publishes the current decision, once the agent has held a lease.
    fn publish(&mut self) {
        let now = self.now();
        let tracker = self.transport.tracker();
        let has_joined = tracker.expires_at().is_some();
        let decision = tracker.decide(now);
        if has_joined || matches!(decision, Decision::Close(_)) {
            self.decisions.send(decision);
        }
    }
}

/// A task that is aborted when this handle is dropped.
pub struct Task<T>(JoinHandle<T>);

impl<T: Send + 'static> Task<T> {
    pub fn spawn(future: impl Future<Output = T> + Send + 'static) -> Task<T> {
        Task(tokio::spawn(future))
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The result of a task; waits forever if there is none.
pub async fn completed<T>(task: &mut Option<Task<T>>) -> T {
    match task {
        Some(running) => match (&mut running.0).await {
            Ok(value) => value,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => std::future::pending().await, // the runtime shuts down
        },
        None => std::future::pending().await,
    }
}
