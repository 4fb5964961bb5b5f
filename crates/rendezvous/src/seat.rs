//! The agent's end of a seat; at the other end a task keeps it, each backend in its own way.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::AbortHandle;

use crate::{Decision, Epoch, RendezvousError, Report, Seat};

/// What the agent asks of the task.
pub enum Command {
    /// To keep the lease.
    Heartbeat,
    /// To say how workers are.
    Report(Epoch, Report),
    /// To give up the seat, and end.
    Leave,
}

/// What the agent sees: nothing before it is in, then decisions, at last perhaps an error.
type Shown = Result<Option<Decision>, RendezvousError>;

/// Where the task shows what is to be done.
pub struct Window(watch::Sender<Shown>);

impl Window {
    /// Shows a decision, if it is another than before.
    pub fn show(&self, decision: Decision) {
        self.0.send_if_modified(|shown| {
            let is_new = !matches!(shown, Ok(Some(old)) if *old == decision);
            if is_new {
                *shown = Ok(Some(decision));
            }
            is_new
        });
    }

    /// The last thing to be shown.
    pub fn fail(&self, error: RendezvousError) {
        let _ = self.0.send_replace(Err(error));
    }
}

/// Starts the task, and returns when it has shown something: the agent is in, or never will be.
pub async fn take(
    start: impl FnOnce(mpsc::Receiver<Command>, Window) -> AbortHandle,
) -> Result<Arc<dyn Seat>, RendezvousError> {
    let (commands, inbox) = mpsc::channel(16);
    let (shown, decision) = watch::channel(Ok(None));
    let handle = Handle {
        task: start(inbox, Window(shown)),
        commands,
        next: Mutex::new(decision.clone()),
        decision: decision.clone(),
    };
    let mut first = decision;
    let end = first.wait_for(|shown| !matches!(shown, Ok(None))).await;
    match end.map(|shown| shown.clone()) {
        Ok(Ok(_)) => Ok(Arc::new(handle)),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(RendezvousError::Left),
    }
}

struct Handle {
    commands: mpsc::Sender<Command>,
    decision: watch::Receiver<Shown>,
    next: Mutex<watch::Receiver<Shown>>,
    task: AbortHandle,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[async_trait]
impl Seat for Handle {
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
