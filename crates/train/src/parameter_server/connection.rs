//! A worker's thread for communication: it pushes gradients and pulls parameters while the worker computes, and renews its
//! lease.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use trainyard_data::Batch;
use trainyard_param_server::{
    ClientError, JobInfo, LEASE_RENEWAL, Piece, PieceGradient, Pulled, Rows, ServerGroup, Taken,
    WorkerId,
};
use trainyard_trace::Ledger;

use super::exchanged_bytes::row_number_bytes;
use super::piece_samples::{PieceSamples, rows_of};
use super::transfers::Transfers;
use crate::error::TrainError;

/// A piece to compute, with what it needs.
pub(super) struct Work {
    pub piece: Piece,
    /// Its samples; none if the worker takes steps of its own.
    pub batches: Vec<Batch>,
    /// The rows of tables among the parameters.
    pub rows: Rows,
    pub parameters: Pulled,
}

/// What a worker has asked for.
pub(super) enum Received {
    Work(Work),
    /// It has not arrived yet.
    NotYet,
    /// There is no work left.
    Done,
}

/// Why the session of a worker ended early.
pub(super) enum Ended {
    Connection(ClientError),
    Training(TrainError),
}

impl From<TrainError> for Ended {
    fn from(error: TrainError) -> Ended {
        Ended::Training(error)
    }
}

impl From<ClientError> for Ended {
    fn from(error: ClientError) -> Ended {
        Ended::Connection(error)
    }
}

/// What the thread has to do.
enum Command {
    /// Load the samples of all pieces from now on.
    Load(PieceSamples),
    /// Take a piece and pull the parameters for it.
    Next,
    /// Push a gradient: the rows of tables, and the bytes for every server.
    Push(PieceGradient, Rows, Vec<Vec<u8>>),
}

/// The connection of a worker that has joined. Dropping it leaves the run.
pub(super) struct Connection {
    pub jobs: Vec<JobInfo>,
    pub worker: WorkerId,
    commands: Option<SyncSender<Command>>,
    work: Receiver<Result<Option<Work>, Ended>>,
    thread: Option<JoinHandle<()>>,
}

impl Connection {
    /// Starts the thread.
    pub(super) fn start(servers: ServerGroup, ledger: &Ledger) -> std::io::Result<Connection> {
        let (jobs, worker) = (servers.jobs().to_vec(), servers.worker());
        let transfers = Transfers::new(ledger, jobs.len());
        let max_rows = jobs.iter().map(JobInfo::max_rows).max().unwrap_or(0);
        // One push and one request may wait: a worker that is faster than the network waits here.
        let (commands, received) = sync_channel(2);
        let (answers, work) = sync_channel(2);
        let thread = thread::Builder::new().name("parameter servers".to_owned());
        let thread = thread.spawn(move || {
            let mut exchange = Exchange {
                servers,
                max_rows,
                samples: None,
                transfers,
                num_wanted: 0,
            };
            if let Err(error) = exchange.run(&received, &answers) {
                // The worker may be gone.
                let _ = answers.send(Err(error));
            }
        })?;
        Ok(Connection {
            jobs,
            worker,
            commands: Some(commands),
            work,
            thread: Some(thread),
        })
    }

    /// Loads the samples of all pieces that are asked for from now on.
    pub(super) fn load(&self, samples: PieceSamples) {
        self.send(Command::Load(samples));
    }

    /// Asks for the next piece.
    pub(super) fn request_work(&self) {
        self.send(Command::Next);
    }

    /// Waits for a piece that was asked for, at most `timeout`.
    pub(super) fn receive_work(&self, timeout: Duration) -> Result<Received, Ended> {
        match self.work.recv_timeout(timeout) {
            Ok(Ok(Some(work))) => Ok(Received::Work(work)),
            Ok(Ok(None)) | Err(RecvTimeoutError::Disconnected) => Ok(Received::Done),
            Ok(Err(ended)) => Err(ended),
            Err(RecvTimeoutError::Timeout) => Ok(Received::NotYet),
        }
    }

    /// Pushes a gradient.
    pub(super) fn push(&self, gradient: PieceGradient, rows: Rows, bytes: Vec<Vec<u8>>) {
        self.send(Command::Push(gradient, rows, bytes));
    }

    /// A thread that has failed does not receive; its error is in the answers.
    fn send(&self, command: Command) {
        if let Some(commands) = &self.commands {
            let _ = commands.send(command);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // The thread has no state that a panic could leave behind.
            let _ = thread.join();
        }
    }
}

/// The state of the thread.
struct Exchange {
    servers: ServerGroup,
    /// The rows of the highest table; 0 if parameters are pulled whole.
    max_rows: usize,
    /// What the samples of pieces are loaded from.
    samples: Option<PieceSamples>,
    transfers: Transfers,
    /// Pieces that the worker has asked for.
    num_wanted: usize,
}

impl Exchange {
    /// Executes commands until the worker ends. A push goes before a request for work: work may wait for it.
    fn run(
        &mut self,
        commands: &Receiver<Command>,
        answers: &SyncSender<Result<Option<Work>, Ended>>,
    ) -> Result<(), Ended> {
        loop {
            let command = if self.num_wanted > 0 {
                match commands.try_recv() {
                    Ok(command) => Some(command),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => return Ok(()),
                }
            } else {
                match commands.recv_timeout(LEASE_RENEWAL) {
                    Ok(command) => Some(command),
                    Err(RecvTimeoutError::Timeout) => {
                        self.servers.renew_lease()?;
                        None
                    }
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
            };
            match command {
                Some(Command::Load(samples)) => self.samples = Some(samples),
                Some(Command::Next) => self.num_wanted += 1,
                Some(Command::Push(gradient, rows, bytes)) => {
                    self.push(gradient, &rows, &bytes)?;
                }
                None if self.num_wanted > 0 => self.take(answers)?,
                None => {}
            }
        }
    }

    fn push(
        &mut self,
        gradient: PieceGradient,
        rows: &Rows,
        bytes: &[Vec<u8>],
    ) -> Result<(), ClientError> {
        let began = self.transfers.now_ns();
        self.servers.push(gradient, rows, bytes)?;
        let numbers = row_number_bytes(rows.len(), bytes.len());
        self.transfers.pushed(num_bytes(bytes) + numbers, began);
        Ok(())
    }

    fn pull(&mut self, version: u64, rows: &Rows) -> Result<Pulled, ClientError> {
        let began = self.transfers.now_ns();
        let pulled = self.servers.pull(version, rows)?;
        let numbers = row_number_bytes(rows.len(), pulled.servers.len());
        let received = num_bytes(&pulled.servers);
        self.transfers.pulled(received, numbers, began);
        Ok(pulled)
    }

    fn take(&mut self, answers: &SyncSender<Result<Option<Work>, Ended>>) -> Result<(), Ended> {
        let answer = match self.servers.take()? {
            Taken::NotYet => return Ok(()),
            Taken::Done => None,
            Taken::Work(piece, version) => {
                let batches = self.batches(piece)?;
                let rows = if self.max_rows > 0 {
                    rows_of(&batches, self.max_rows)?
                } else {
                    Rows::default()
                };
                Some(Work {
                    piece,
                    parameters: self.pull(version, &rows)?,
                    batches,
                    rows,
                })
            }
        };
        self.num_wanted -= 1;
        let _ = answers.send(Ok(answer));
        Ok(())
    }

    /// The samples of a piece. A slow file system may take longer than a lease.
    fn batches(&mut self, piece: Piece) -> Result<Vec<Batch>, Ended> {
        match &self.samples {
            Some(samples) => {
                let load = || samples.batches(piece);
                Ok(self.servers.renew_lease_while(load)??)
            }
            None => Ok(Vec::new()),
        }
    }
}

fn num_bytes(servers: &[Vec<u8>]) -> u64 {
    servers.iter().map(|bytes| bytes.len() as u64).sum()
}
