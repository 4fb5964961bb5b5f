//! Where letters are decided: one task, which owns the state, so that nothing has to be locked.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::mpsc::{Receiver, Sender};
use tokio::time::{Instant, sleep_until};

use super::disk::Disk;
use crate::{Answer, Desk, Letter, Record, RendezvousError, Reply};

/// Letters decided together.
const BATCH: usize = 512;
/// Answers that wait for one agent. Who lets more pile up misses some.
pub const MOST_WAITING: usize = 64;

/// How much was said.
#[derive(Debug, Default)]
pub struct Traffic {
    letters: AtomicU64,
    answers: AtomicU64,
}

impl Traffic {
    /// Letters that came, and answers that went.
    pub fn count(&self) -> (u64, u64) {
        (self.letters.load(Relaxed), self.answers.load(Relaxed))
    }
}

/// A letter, and where its answer goes.
pub struct Mail {
    pub letter: Letter,
    pub reply_to: Sender<Answer>,
}

/// The task's own.
pub struct Office {
    desk: Desk,
    disk: Disk,
    started: Instant,
    traffic: Arc<Traffic>,
    /// Where each agent, by node, is reached.
    doors: HashMap<String, (u64, Sender<Answer>)>,
}

impl Office {
    pub fn new(record: Record, disk: Disk, traffic: Arc<Traffic>) -> Office {
        Office {
            desk: Desk::resume(record, Duration::ZERO),
            disk,
            traffic,
            started: Instant::now(),
            doors: HashMap::new(),
        }
    }

    /// Decides until nobody can write any more, or the record cannot be kept.
    pub async fn run(mut self, mut mail: Receiver<Mail>) -> Result<(), RendezvousError> {
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            let wake_at = self.desk.wake_at().map(|at| self.started + at);
            let sleep = async {
                match wake_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                count = mail.recv_many(&mut batch, BATCH) => {
                    if count == 0 {
                        return Ok(());
                    }
                }
                () = sleep => {}
            }
            self.decide(&mut batch).await?;
        }
    }

    async fn decide(&mut self, batch: &mut Vec<Mail>) -> Result<(), RendezvousError> {
        let now = self.started.elapsed();
        let mut publish = self.desk.tick(now).publish;
        self.traffic.letters.fetch_add(batch.len() as u64, Relaxed);
        let mut replies = Vec::with_capacity(batch.len());
        for Mail { letter, reply_to } in batch.drain(..) {
            let (node, instance) = (letter.node.clone(), letter.instance);
            let reply = self.desk.receive(letter, now);
            if let Some(Answer::Heard { .. }) = reply.answer {
                self.doors.insert(node, (instance, reply_to.clone()));
            }
            publish |= reply.publish;
            replies.push((reply_to, reply));
        }
        if publish {
            self.keep().await?;
        }
        for (reply_to, reply) in replies {
            self.answer(&reply_to, reply, publish);
        }
        if publish {
            self.tell_everybody();
        }
        Ok(())
    }

    /// Durable before anybody hears of it.
    async fn keep(&self) -> Result<(), RendezvousError> {
        let (disk, record) = (self.disk.clone(), self.desk.record().clone());
        tracing::info!(version = record.version, epoch = record.epoch.0, phase = ?record.phase, "record");
        let written = tokio::task::spawn_blocking(move || disk.write(&record)).await;
        written.unwrap_or_else(|error| {
            Err(RendezvousError::Disk {
                path: String::new(),
                cause: error.to_string(),
            })
        })
    }

    fn answer(&self, to: &Sender<Answer>, reply: Reply, all_are_told: bool) {
        if let Some(Answer::Refused { refusal, .. }) = &reply.answer {
            tracing::warn!(%refusal, "refused");
        }
        let told = reply
            .tell
            .filter(|agent| !(all_are_told && self.desk.attends(agent)))
            .map(|agent| self.desk.tell(&agent));
        for answer in reply.answer.into_iter().chain(told) {
            // Full or closed: what is missed here comes with the answer to the next heartbeat.
            let _ = to.try_send(answer);
            self.traffic.answers.fetch_add(1, Relaxed);
        }
    }

    fn tell_everybody(&mut self) {
        let mut reached = HashMap::with_capacity(self.doors.len());
        for agent in self.desk.attending() {
            if let Some((instance, door)) = self.doors.remove(&agent.node)
                && instance == agent.instance
                && door.try_send(self.desk.tell(agent)).is_ok()
            {
                self.traffic.answers.fetch_add(1, Relaxed);
                reached.insert(agent.node.clone(), (instance, door));
            }
        }
        self.doors = reached;
    }
}
