//! One parameter server: parameters for workers that pull them, and gradients that workers push.
//!
//! Connections have threads of their own, which never touch tensors: they copy bytes in and out. One thread owns the model. On
//! the leader it waits for the next update, tells the other servers, applies it and publishes the parameters.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use trainyard_tls::{MessageServer, RunSecret, ServerStream, Service};

use crate::chunks::{receive_chunks, send_chunks};
use crate::protocol::{JobInfo, PROTOCOL, ParamShard, PieceGradient, Reply, Request};
use crate::rows::{Rows, scatter, transferred};
use crate::work_queue::{Piece, Progress, Take, Update, WorkQueue, WorkerId};

/// A worker that the leader has not heard of for this long has lost its lease.
const LEASE: Duration = Duration::from_secs(30);
/// Only the leader decides which workers are lost; other servers keep connections for longer than any step takes.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3600);
/// How long a request waits for what it asks, before the worker has to ask again: its requests renew its lease.
const POLL_TIMEOUT: Duration = Duration::from_millis(100);

/// A running server.
#[derive(Debug)]
pub struct ParameterServer {
    server: MessageServer,
    shared: Arc<Shared>,
}

/// What connections and the thread with the model share.
#[derive(Debug)]
struct Shared {
    job: JobInfo,
    is_leader: bool,
    grace_period: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The work of all workers; the leader's decides.
    queue: WorkQueue,
    /// Since when there are enough gradients for an update.
    has_quorum_since: Option<Instant>,
    /// The bytes of gradients. Until the leader has accepted one, there may be another of the same piece, from a worker that
    /// has lost its lease.
    gradients: HashMap<(WorkerId, Piece), Pushed>,
    /// What workers say of gradients that the leader has accepted.
    accepted: HashMap<Piece, PieceGradient>,
    parameters: Option<(u64, Arc<Vec<u8>>)>,
    num_left: u64,
}

impl ParameterServer {
    /// Listens on `address`. Workers wait until parameters are [published](Self::publish). Once there are enough gradients for
    /// an update, the leader waits for more during the grace period.
    pub fn start(
        address: &str,
        secret: &RunSecret,
        job: JobInfo,
        (queue, grace_period): (WorkQueue, Duration),
        is_leader: bool,
    ) -> io::Result<ParameterServer> {
        let shared = Arc::new(Shared {
            job,
            is_leader,
            grace_period,
            state: Mutex::new(State {
                queue,
                has_quorum_since: None,
                gradients: HashMap::new(),
                accepted: HashMap::new(),
                parameters: None,
                num_left: 0,
            }),
            changed: Condvar::new(),
        });
        let server =
            MessageServer::start(address, (Service::ParameterServer, secret), PROTOCOL, {
                let shared = Arc::clone(&shared);
                move |stream, from| shared.serve(stream, from)
            })?;
        Ok(ParameterServer { server, shared })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Waits for the next update that the leader has to apply; `None` if there is none within `timeout`.
    pub fn next_update(&self, timeout: Duration) -> Option<Update> {
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.lock();
        loop {
            let update = state.next_update(self.shared.grace_period);
            let left = deadline.saturating_duration_since(Instant::now());
            if update.is_some() || left.is_zero() || state.queue.is_complete() {
                return update;
            }
            let left = match state.has_quorum_since {
                Some(since) => left.min(self.shared.grace_period.saturating_sub(since.elapsed())),
                None => left,
            };
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What a worker says of the gradient of a piece, on the leader.
    pub fn take_accepted(&self, piece: Piece) -> Option<PieceGradient> {
        self.shared.lock().accepted.remove(&piece)
    }

    /// The number of micro-batches whose gradients have been applied.
    pub fn num_applied(&self) -> u64 {
        self.shared.lock().queue.num_applied()
    }

    /// Removes a gradient, and all others of its piece: the bytes of this server's shards that are trained.
    pub fn take_gradient(&self, gradient: &PieceGradient) -> Option<Vec<u8>> {
        let mut state = self.shared.lock();
        let pushed = state.gradients.remove(&(gradient.worker, gradient.piece));
        state
            .gradients
            .retain(|(_, piece), _| *piece != gradient.piece);
        drop(state);
        let (job, Pushed { rows, bytes }) = (&self.shared.job, pushed?);
        if job.max_rows() == 0 {
            return Some(bytes);
        }
        let num_bytes = job.trained_shards().map(ParamShard::num_bytes).sum();
        let intervals = transferred(job.trained_shards(), &rows);
        Some(scatter(&intervals, &bytes, num_bytes))
    }

    /// Gives workers these parameters from now on, which result from `update`.
    pub fn publish(&self, version: u64, parameters: Vec<u8>, update: Option<&Update>) {
        let mut state = self.shared.lock();
        state.parameters = Some((version, Arc::new(parameters)));
        if let Some(update) = update {
            state.queue.apply(update);
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    /// The number of workers that have joined the leader and not left.
    pub fn num_workers(&self) -> usize {
        self.shared.lock().queue.num_workers()
    }

    /// The number of workers that have left or were lost.
    pub fn num_left(&self) -> u64 {
        self.shared.lock().num_left
    }

    /// Which gradients have been applied.
    pub fn progress(&self) -> Progress {
        self.shared.lock().queue.progress()
    }

    /// Waits until all workers know that the work is done, at most `timeout`.
    pub fn wait_for_workers_to_leave(&self, timeout: Duration) {
        let left = |state: &State| state.queue.num_workers() == 0;
        drop(self.shared.wait(timeout, left));
    }
}

/// A gradient as it has arrived.
#[derive(Debug)]
struct Pushed {
    rows: Rows,
    bytes: Vec<u8>,
}

impl State {
    fn next_update(&mut self, grace_period: Duration) -> Option<Update> {
        let has_quorum = self.queue.has_quorum();
        let since = self.has_quorum_since.unwrap_or_else(Instant::now);
        self.has_quorum_since = has_quorum.then_some(since);
        let is_grace_over = has_quorum && since.elapsed() >= grace_period;
        let update = self.queue.next_update(is_grace_over)?;
        self.has_quorum_since = None;
        Some(update)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `is_ready`, at most `timeout`.
    fn wait(&self, timeout: Duration, is_ready: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        while !is_ready(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }

    /// Answers a worker until it disconnects or, on the leader, its lease ends.
    fn serve(&self, stream: ServerStream, from: SocketAddr) {
        let mut connection = Connection {
            shared: self,
            stream,
            worker: None,
        };
        let ended = connection.serve();
        let Some(worker) = connection.worker else {
            return;
        };
        let mut state = self.lock();
        state.queue.leave(worker);
        state.num_left += 1;
        let (is_complete, num_left) = (state.queue.is_complete(), state.queue.num_workers());
        drop(state);
        self.changed.notify_all();
        match ended {
            Err(error) if !is_complete => tracing::warn!(
                "worker {} at {from} is lost ({error}); {num_left} workers are left, and compute what it had taken",
                worker.0
            ),
            _ => tracing::info!("worker {} at {from} has left", worker.0),
        }
    }
}

/// The connection of a worker.
struct Connection<'a> {
    shared: &'a Shared,
    stream: ServerStream,
    /// Set once it has joined the leader.
    worker: Option<WorkerId>,
}

impl Connection<'_> {
    fn serve(&mut self) -> io::Result<()> {
        let timeout = if self.shared.is_leader {
            LEASE
        } else {
            IDLE_TIMEOUT
        };
        loop {
            let message = self.stream.receive_within(timeout)?;
            let request = serde_json::from_slice(&message).map_err(io::Error::other)?;
            match request {
                Request::Describe => self.reply(&Reply::Job(self.shared.job.clone()))?,
                Request::Join => self.join()?,
                Request::Take => self.take()?,
                Request::Pull { version, num_rows } => self.pull(version, num_rows)?,
                Request::Push { gradient, num_rows } => self.push(gradient, num_rows)?,
                Request::Heartbeat => self.reply(&Reply::Received)?,
            }
        }
    }

    fn reply(&mut self, reply: &Reply) -> io::Result<()> {
        let message = serde_json::to_vec(reply).map_err(io::Error::other)?;
        self.stream.send(&message)
    }

    fn reject(&mut self, reason: &str) -> io::Result<()> {
        self.reply(&Reply::Rejected(reason.to_owned()))
    }

    fn join(&mut self) -> io::Result<()> {
        if !self.shared.is_leader || self.worker.is_some() {
            return self.reject("workers join the leader, once");
        }
        let worker = self.shared.lock().queue.join();
        self.worker = Some(worker);
        self.reply(&Reply::Joined(worker))
    }

    fn take(&mut self) -> io::Result<()> {
        let Some(worker) = self.worker else {
            return self.reject("the worker has not joined");
        };
        let deadline = Instant::now() + POLL_TIMEOUT;
        let mut state = self.shared.lock();
        let reply = loop {
            match state.queue.take(worker) {
                Take::Piece(piece) => {
                    let version = self.version_for(piece, &state);
                    break Reply::Piece { piece, version };
                }
                Take::Done => break Reply::Done,
                Take::Wait => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Reply::NotYet;
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(state);
        self.reply(&reply)
    }

    /// The version of the parameters that a piece needs at least: all gradients that have arrived are in it, those of the worker
    /// itself among them.
    fn version_for(&self, piece: Piece, state: &State) -> u64 {
        if self.shared.job.is_synchronous {
            return piece.step;
        }
        let published = state.parameters.as_ref().map_or(0, |(version, _)| *version);
        published + state.queue.num_pending_updates()
    }

    fn pull(&mut self, version: u64, num_rows: usize) -> io::Result<()> {
        let rows = self.receive_rows(num_rows)?;
        let is_new = |state: &State| state.parameters.as_ref().is_some_and(|p| p.0 >= version);
        let state = self.shared.wait(POLL_TIMEOUT, is_new);
        let found = state.parameters.clone().filter(|found| found.0 >= version);
        drop(state);
        let Some((version, bytes)) = found else {
            return self.reply(&Reply::NotYet);
        };
        let intervals = transferred(self.shared.job.shards.iter(), &rows);
        let num_bytes = intervals.iter().map(ExactSizeIterator::len).sum();
        self.reply(&Reply::Parameters { version, num_bytes })?;
        send_chunks(&bytes, &intervals, |chunk| self.stream.send(chunk))
    }

    fn push(&mut self, gradient: PieceGradient, num_rows: usize) -> io::Result<()> {
        let rows = self.receive_rows(num_rows)?;
        let shards = self.shared.job.trained_shards();
        let num_bytes = shards.map(|shard| shard.num_transferred_bytes(&rows)).sum();
        let bytes = receive_chunks(num_bytes, || self.stream.receive())?;
        let PieceGradient { worker, piece, .. } = gradient;
        let mut state = self.shared.lock();
        if self.shared.is_leader {
            let is_own = self.worker == Some(worker);
            if !is_own || !state.queue.push(worker, piece, gradient.seconds) {
                drop(state);
                return self.reject("the worker has not taken this piece");
            }
            state.accepted.insert(piece, gradient);
        }
        state
            .gradients
            .insert((worker, piece), Pushed { rows, bytes });
        drop(state);
        self.shared.changed.notify_all();
        self.reply(&Reply::Received)
    }

    fn receive_rows(&mut self, num_rows: usize) -> io::Result<Rows> {
        if num_rows > self.shared.job.max_rows() {
            return Err(ErrorKind::InvalidData.into());
        }
        let bytes = receive_chunks(Rows::num_bytes(num_rows), || self.stream.receive())?;
        Rows::from_bytes(&bytes).ok_or_else(|| ErrorKind::InvalidData.into())
    }
}

#[cfg(test)]
mod tests {
    use trainyard_tls::RunSecret;

    use super::*;
    use crate::work_queue::{UpdateRule, WorkQueueOptions};
    use crate::{ClientError, ServerGroup, Taken};

    const STEPS: u64 = 3;

    fn job(first: usize) -> JobInfo {
        JobInfo {
            digest: "job".to_owned(),
            global_batch: 4,
            pieces_per_step: 2,
            is_synchronous: true,
            shards: vec![ParamShard {
                name: "weight".to_owned(),
                elements: vec![first..first + 100_000, first + 100_000..first + 300_000],
                element_bytes: 4,
                is_trainable: true,
                table: None,
            }],
        }
    }

    fn server(secret: &RunSecret, first: usize, is_leader: bool) -> ParameterServer {
        let options = WorkQueueOptions {
            microbatches_per_step: 4,
            microbatches_per_piece: 2,
            num_steps: STEPS,
            max_staleness: Some(0),
            update_rule: UpdateRule::Step,
            is_balanced: false,
        };
        let start = Progress {
            step: 0,
            applied: Vec::new(),
        };
        let queue = (WorkQueue::new(options, &start), Duration::ZERO);
        ParameterServer::start("127.0.0.1:0", secret, job(first), queue, is_leader).unwrap()
    }

    fn gradient(worker: WorkerId, piece: Piece, version: u64) -> PieceGradient {
        PieceGradient {
            worker,
            piece,
            version,
            num_targets: 1,
            loss: 0.0,
            seconds: 1.0,
        }
    }

    /// Pushes the number of every piece to both servers until there is no work left.
    fn work(addresses: &[String], secret: &RunSecret) -> Result<u64, ClientError> {
        let mut servers = ServerGroup::join(addresses, secret, "job")?;
        let mut num_pieces = 0;
        loop {
            let (piece, version) = match servers.take()? {
                Taken::Work(piece, version) => (piece, version),
                Taken::NotYet => continue,
                Taken::Done => break,
            };
            let pulled = servers.pull(version, &Rows::default())?;
            assert_eq!(pulled.version, piece.step);
            assert!(
                pulled
                    .servers
                    .iter()
                    .flatten()
                    .all(|&byte| u64::from(byte) == piece.step)
            );
            servers.renew_lease()?;
            let bytes = vec![vec![piece.first as u8; 1_200_000]; 2];
            let worker = servers.worker();
            let gradient = gradient(worker, piece, pulled.version);
            servers.push(gradient, &Rows::default(), &bytes)?;
            num_pieces += 1;
        }
        Ok(num_pieces)
    }

    #[test]
    fn all_servers_have_the_gradients_that_the_leader_decides_on() {
        let secret = RunSecret::random().unwrap();
        let servers = [server(&secret, 0, true), server(&secret, 300_000, false)];
        let addresses = servers
            .each_ref()
            .map(|server| server.address().to_string());
        let parameters = |version: u64| vec![version as u8; 1_200_000];
        servers
            .iter()
            .for_each(|server| server.publish(0, parameters(0), None));
        let num_pieces: u64 = std::thread::scope(|scope| {
            let worker = || work(&addresses, &secret).unwrap();
            let workers = [scope.spawn(worker), scope.spawn(worker)];
            for step in 0..STEPS {
                let update = loop {
                    if let Some(update) = servers[0].next_update(LEASE) {
                        break update;
                    }
                };
                for piece in &update.pieces {
                    let accepted = servers[0].take_accepted(*piece).unwrap();
                    for server in &servers {
                        let bytes = server.take_gradient(&accepted).unwrap();
                        assert_eq!(bytes, vec![piece.first as u8; 1_200_000]);
                    }
                }
                for server in &servers {
                    server.publish(step + 1, parameters(step + 1), Some(&update));
                }
            }
            workers.map(|worker| worker.join().unwrap()).iter().sum()
        });
        assert_eq!(num_pieces, 2 * STEPS);
        servers[0].wait_for_workers_to_leave(LEASE);
        assert_eq!((servers[0].num_workers(), servers[0].num_left()), (0, 2));
    }

    #[test]
    fn strangers_other_jobs_and_pieces_that_were_not_taken_are_rejected() {
        let secret = RunSecret::random().unwrap();
        let server = server(&secret, 0, true);
        let addresses = [server.address().to_string()];
        let stranger = RunSecret::random().unwrap();
        let refused = ServerGroup::join(&addresses, &stranger, "job").unwrap_err();
        assert!(
            matches!(refused, ClientError::Connection { .. }),
            "{refused}"
        );
        let other = ServerGroup::join(&addresses, &secret, "another job").unwrap_err();
        assert!(matches!(other, ClientError::OtherJob { .. }), "{other}");
        let mut worker = ServerGroup::join(&addresses, &secret, "job").unwrap();
        let piece = Piece {
            step: 0,
            first: 0,
            num: 4,
        };
        let bytes = vec![vec![0; 1_200_000]];
        let rejected = worker
            .push(
                gradient(worker.worker(), piece, 0),
                &Rows::default(),
                &bytes,
            )
            .unwrap_err();
        assert!(
            matches!(rejected, ClientError::Rejected { .. }),
            "{rejected}"
        );
    }
}
