//! The task that owns the coordinator, so that its state needs no lock.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::mpsc::{Receiver, Sender};
use tokio::time::{Instant, sleep_until};

use super::record_file::RecordFile;
use crate::{Coordinator, RendezvousError, Reply, Request, Response, RunState};

/// The maximum number of requests in a batch.
const MAX_BATCH: usize = 512;
/// The capacity of the queue of responses to one agent. Responses that do not fit are dropped.
pub const RESPONSE_QUEUE: usize = 64;

/// The number of messages so far.
#[derive(Debug, Default)]
pub struct Traffic {
    requests: AtomicU64,
    responses: AtomicU64,
}

impl Traffic {
    /// The number of requests received, and of responses sent.
    pub fn count(&self) -> (u64, u64) {
        (self.requests.load(Relaxed), self.responses.load(Relaxed))
    }
}

/// A request, and where its response goes.
pub struct Inbound {
    pub request: Request,
    pub reply_to: Sender<Response>,
}

/// The state of the task.
pub struct CoordinatorTask {
    coordinator: Coordinator,
    record_file: RecordFile,
    started: Instant,
    traffic: Arc<Traffic>,
    /// The instance and the response queue of each agent, by node.
    connections: HashMap<String, (u64, Sender<Response>)>,
}

impl CoordinatorTask {
    pub fn new(run_state: RunState, record_file: RecordFile, traffic: Arc<Traffic>) -> Self {
        CoordinatorTask {
            coordinator: Coordinator::resume(run_state, Duration::ZERO),
            record_file,
            traffic,
            started: Instant::now(),
            connections: HashMap::new(),
        }
    }

    /// Handles requests until no connection can send any, or until the run state cannot be written.
    pub async fn run(mut self, mut inbound: Receiver<Inbound>) -> Result<(), RendezvousError> {
        let mut batch = Vec::with_capacity(MAX_BATCH);
        loop {
            let wake_at = self.coordinator.wake_at().map(|at| self.started + at);
            let sleep = async {
                match wake_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                count = inbound.recv_many(&mut batch, MAX_BATCH) => {
                    if count == 0 {
                        return Ok(());
                    }
                }
                () = sleep => {}
            }
            self.handle(&mut batch).await?;
        }
    }

    async fn handle(&mut self, batch: &mut Vec<Inbound>) -> Result<(), RendezvousError> {
        let now = self.started.elapsed();
        let mut publish = self.coordinator.tick(now).publish;
        self.traffic.requests.fetch_add(batch.len() as u64, Relaxed);
        let mut replies = Vec::with_capacity(batch.len());
        for Inbound { request, reply_to } in batch.drain(..) {
            let (node, instance) = (request.node.clone(), request.instance);
            let reply = self.coordinator.handle(request, now);
            if let Some(Response::Ack { .. }) = reply.response {
                self.connections.insert(node, (instance, reply_to.clone()));
            }
            publish |= reply.publish;
            replies.push((reply_to, reply));
        }
        if publish {
            self.persist().await?;
        }
        for (reply_to, reply) in replies {
            self.respond(&reply_to, reply, publish);
        }
        if publish {
            self.broadcast();
        }
        Ok(())
    }

    /// Writes the run state. It must be durable before any agent learns of it.
    async fn persist(&self) -> Result<(), RendezvousError> {
        let (file, run_state) = (
            self.record_file.clone(),
            self.coordinator.run_state().clone(),
        );
        tracing::info!(version = run_state.version, epoch = run_state.epoch.0, phase = ?run_state.phase, "run state");
        let written = tokio::task::spawn_blocking(move || file.write(&run_state)).await;
        written.unwrap_or_else(|error| Err(self.record_file.write_error(error.to_string())))
    }

    /// Sends the response, and the newest decision unless the following broadcast includes the sender.
    fn respond(&self, to: &Sender<Response>, reply: Reply, broadcast_follows: bool) {
        if let Some(Response::Rejected { rejection, .. }) = &reply.response {
            tracing::warn!(%rejection, "rejected a request");
        }
        let decision = reply
            .decision_for
            .filter(|agent| !(broadcast_follows && self.coordinator.is_member(agent)))
            .map(|agent| self.coordinator.decision_for(&agent));
        for response in reply.response.into_iter().chain(decision) {
            // If the queue is full or closed, the agent gets the decision with the response to its next heartbeat.
            let _ = to.try_send(response);
            self.traffic.responses.fetch_add(1, Relaxed);
        }
    }

    /// Sends every member its decision, and forgets the connections that are closed or whose queue is full.
    fn broadcast(&mut self) {
        let mut reached = HashMap::with_capacity(self.connections.len());
        for agent in self.coordinator.members() {
            if let Some((instance, connection)) = self.connections.remove(&agent.node)
                && instance == agent.instance
                && connection
                    .try_send(self.coordinator.decision_for(agent))
                    .is_ok()
            {
                self.traffic.responses.fetch_add(1, Relaxed);
                reached.insert(agent.node.clone(), (instance, connection));
            }
        }
        self.connections = reached;
    }
}
