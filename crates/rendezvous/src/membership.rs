//! The agent's handle of its membership; a task at the other end keeps the session.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::AbortHandle;

use crate::session::{SessionConfig, Transport, drive};
use crate::{Decision, Epoch, Membership, RendezvousError, Report};

/// What the agent asks of the session task.
pub enum Command {
    /// Renew the lease.
    Heartbeat,
    /// Report the state of the workers of an epoch.
    Report(Epoch, Report),
    /// Leave the run, and end the task.
    Leave,
}

/// What the agent sees: nothing before it has joined, then decisions, and finally perhaps an error.
type Published = Result<Option<Decision>, RendezvousError>;

/// Publishes decisions to the agent.
pub struct DecisionSender(watch::Sender<Published>);

impl DecisionSender {
    /// Publishes a decision if it differs from the last one.
    pub fn send(&self, decision: Decision) {
        self.0.send_if_modified(|published| {
            let is_new = !matches!(published, Ok(Some(old)) if *old == decision);
            if is_new {
                *published = Ok(Some(decision));
            }
            is_new
        });
    }

    /// Publishes the error that ended the session.
    pub fn fail(&self, error: RendezvousError) {
        let _ = self.0.send_replace(Err(error));
    }
}

/// Starts the session task, and returns when the agent has joined or cannot join.
pub async fn spawn_session(
    config: SessionConfig,
    transport: impl Transport,
) -> Result<Arc<dyn Membership>, RendezvousError> {
    let (commands, inbox) = mpsc::channel(16);
    let (published, decision) = watch::channel(Ok(None));
    let task = tokio::spawn(drive(config, transport, inbox, DecisionSender(published)));
    let handle = Handle {
        task: task.abort_handle(),
        commands,
        next: Mutex::new(decision.clone()),
        decision: decision.clone(),
    };
    let mut first = decision;
    let published = first
        .wait_for(|published| !matches!(published, Ok(None)))
        .await;
    match published.map(|published| published.clone()) {
        Ok(Ok(_)) => Ok(Arc::new(handle)),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(RendezvousError::Left),
    }
}

struct Handle {
    commands: mpsc::Sender<Command>,
    decision: watch::Receiver<Published>,
    next: Mutex<watch::Receiver<Published>>,
    task: AbortHandle,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[async_trait]
impl Membership for Handle {
    fn decision(&self) -> Decision {
        match &*self.decision.borrow() {
            Ok(Some(decision)) => decision.clone(),
            Ok(None) | Err(_) => Decision::Wait {
                epoch: Epoch(0),
                reason: "not in the run".into(),
            },
        }
    }

    async fn next(&self) -> Result<Decision, RendezvousError> {
        let mut next = self.next.lock().await;
        loop {
            next.changed().await.map_err(|_| RendezvousError::Left)?;
            if let Some(decision) = next.borrow_and_update().clone()? {
                return Ok(decision);
            }
        }
    }

    async fn heartbeat(&self) {
        let _ = self.commands.send(Command::Heartbeat).await;
    }

    async fn report(&self, epoch: Epoch, report: Report) {
        let _ = self.commands.send(Command::Report(epoch, report)).await;
    }

    async fn leave(&self) {
        let _ = self.commands.send(Command::Leave).await;
        self.commands.closed().await;
    }
}
