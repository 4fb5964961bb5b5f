//! The agent's handle of the rendezvous: delivers decisions to a loop that polls file descriptors.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use trainyard_rendezvous::{
    Decision, Epoch, Join, Membership, RankAssignment, RendezvousError, Report, RunSecret,
};

use crate::rendezvous_config::{EmbeddedServer, RendezvousConfig};
use crate::state::Event;

/// Queuing a heartbeat takes less than this; the agent's loop must not block on it.
const SEND_TIMEOUT: Duration = Duration::from_millis(200);
/// How long sending a report or leaving may take.
const REPORT_TIMEOUT: Duration = Duration::from_secs(3);

/// A blocking handle of the asynchronous rendezvous client. It exists before the agent has joined.
pub(crate) struct RendezvousHandle {
    runtime: Runtime,
    shared: Arc<Shared>,
    events: mpsc::Receiver<Event>,
    waker: UnixStream,
    session: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    membership: OnceLock<Arc<dyn Membership>>,
    server: Mutex<Option<EmbeddedServer>>,
}

/// Sends events to the agent's loop and wakes it up.
struct EventSender {
    events: mpsc::Sender<Event>,
    waker: UnixStream,
}

impl RendezvousHandle {
    /// Joins the run in the background, for up to the policy's join timeout, and then receives decisions.
    pub(crate) fn open(
        runtime: Runtime,
        config: RendezvousConfig,
        secret: RunSecret,
        join: Join,
    ) -> io::Result<RendezvousHandle> {
        let (waker, remote_waker) = UnixStream::pair()?;
        waker.set_nonblocking(true)?;
        remote_waker.set_nonblocking(true)?;
        let (sender, events) = mpsc::channel();
        let sender = EventSender {
            events: sender,
            waker: remote_waker,
        };
        let shared = Arc::<Shared>::default();
        let session = runtime.spawn(run_session(
            config,
            secret,
            join,
            Arc::clone(&shared),
            sender,
        ));
        Ok(RendezvousHandle {
            runtime,
            shared,
            events,
            waker,
            session,
        })
    }

    /// The events since the last call.
    pub(crate) fn events(&mut self) -> Vec<Event> {
        let mut buffer = [0; 64];
        while matches!(self.waker.read(&mut buffer), Ok(length) if length > 0) {}
        self.events.try_iter().collect()
    }

    /// Whether the current decision is to run workers with this assignment.
    pub(crate) fn is_current(&self, assignment: &RankAssignment) -> bool {
        let decision = self
            .shared
            .membership
            .get()
            .map(|membership| membership.decision());
        matches!(decision, Some(Decision::Run(current)) if current == *assignment)
    }

    /// Renews the lease.
    pub(crate) fn heartbeat(&self) {
        self.with_membership(SEND_TIMEOUT, async |membership| {
            membership.heartbeat().await
        });
    }

    /// Reports the state of the workers of an epoch.
    pub(crate) fn report(&self, epoch: Epoch, report: Report) {
        self.with_membership(REPORT_TIMEOUT, async |membership| {
            membership.report(epoch, report).await;
        });
    }

    /// Leaves the run.
    pub(crate) fn leave(&self) {
        self.with_membership(REPORT_TIMEOUT, async |membership| membership.leave().await);
    }

    /// Disconnects. An embedded server first waits until the other agents have disconnected, at most for `timeout`.
    pub(crate) fn close(self, timeout: Duration) {
        self.session.abort();
        let server = self.shared.server.lock();
        let server = server.unwrap_or_else(PoisonError::into_inner).take();
        // Drops the membership, and with it this agent's own connection.
        drop(self.shared);
        if let Some(server) = server {
            self.runtime.block_on(async {
                let _ = self.session.await;
                server.wait_until_disconnected(timeout).await;
            });
        }
        self.runtime.shutdown_timeout(SEND_TIMEOUT);
    }

    fn with_membership(&self, timeout: Duration, act: impl AsyncFnOnce(&dyn Membership)) {
        if let Some(membership) = self.shared.membership.get() {
            let act = async {
                if tokio::time::timeout(timeout, act(&**membership))
                    .await
                    .is_err()
                {
                    tracing::warn!("sending to the rendezvous timed out after {timeout:?}");
                }
            };
            self.runtime.block_on(act);
        }
    }
}

impl AsFd for RendezvousHandle {
    /// Becomes readable when there are events.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }
}

impl EventSender {
    fn send(&mut self, event: Event) {
        let _ = self.events.send(event);
        // If the socket buffer is full, the loop wakes up anyway.
        let _ = self.waker.write(&[1]);
    }
}

async fn run_session(
    config: RendezvousConfig,
    secret: RunSecret,
    join: Join,
    shared: Arc<Shared>,
    mut sender: EventSender,
) {
    let Err(error) = send_decisions(config, secret, join, shared, &mut sender).await;
    sender.send(Event::Disconnected(error));
}

/// Joins the run and sends every decision, until the connection is lost for good.
async fn send_decisions(
    config: RendezvousConfig,
    secret: RunSecret,
    join: Join,
    shared: Arc<Shared>,
    sender: &mut EventSender,
) -> Result<std::convert::Infallible, RendezvousError> {
    let connected = config.connect(&join.run, &secret).await?;
    *shared.server.lock().unwrap_or_else(PoisonError::into_inner) = connected.server;
    let membership = connected.backend.join(join).await?;
    let membership = shared.membership.get_or_init(|| membership);
    loop {
        sender.send(Event::Decided(membership.next().await?));
    }
}
