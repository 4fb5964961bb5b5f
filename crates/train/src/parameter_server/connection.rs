//! A worker's thread for communication: it pushes gradients and pulls parameters while the worker computes, and renews its
//! lease.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};

use trainyard_param_server::{
    ClientError, JobInfo, LEASE_RENEWAL, Piece, PieceGradient, Pulled, ServerGroup, Taken, WorkerId,
};
use trainyard_trace::Ledger;

use super::transfers::Transfers;

/// A piece to compute, with the parameters for it.
pub(super) struct Work {
    pub piece: Piece,
    pub parameters: Pulled,
}

/// What the thread has to do.
enum Command {
    /// Take a piece and pull the parameters for it.
    Next,
    /// Push a gradient: the bytes for every server.
    Push(PieceGradient, Vec<Vec<u8>>),
}

/// The connection of a worker that has joined. Dropping it leaves the run.
pub(super) struct Connection {
    pub jobs: Vec<JobInfo>,
    pub worker: WorkerId,
    commands: Option<SyncSender<Command>>,
    work: Receiver<Result<Option<Work>, ClientError>>,
    thread: Option<JoinHandle<()>>,
}

impl Connection {
    /// Starts the thread.
    pub(super) fn start(servers: ServerGroup, ledger: &Ledger) -> std::io::Result<Connection> {
        let (jobs, worker) = (servers.jobs().to_vec(), servers.worker());
        let transfers = Transfers::new(ledger, jobs.len());
        // One push and one request may wait: a worker that is faster than the network waits here.
        let (commands, received) = sync_channel(2);
        let (answers, work) = sync_channel(2);
        let thread = thread::Builder::new().name("parameter servers".to_owned());
        let thread = thread.spawn(move || {
            let mut exchange = Exchange {
                servers,
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

    /// Asks for the next piece.
    pub(super) fn request_work(&self) {
        self.send(Command::Next);
    }

    /// Waits for a piece that was asked for; `None` if there is no work left.
    pub(super) fn receive_work(&self) -> Result<Option<Work>, ClientError> {
        self.work.recv().unwrap_or(Ok(None))
    }

    /// Pushes a gradient.
    pub(super) fn push(&self, gradient: PieceGradient, bytes: Vec<Vec<u8>>) {
        self.send(Command::Push(gradient, bytes));
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
    transfers: Transfers,
    /// Pieces that the worker has asked for.
    num_wanted: usize,
}

impl Exchange {
    /// Executes commands until the worker ends. A push goes before a request for work: work may wait for it.
    fn run(
        &mut self,
        commands: &Receiver<Command>,
        answers: &SyncSender<Result<Option<Work>, ClientError>>,
    ) -> Result<(), ClientError> {
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
                Some(Command::Next) => self.num_wanted += 1,
                Some(Command::Push(gradient, bytes)) => self.push(gradient, &bytes)?,
                None if self.num_wanted > 0 => self.take(answers)?,
                None => {}
            }
        }
    }

    fn push(&mut self, gradient: PieceGradient, bytes: &[Vec<u8>]) -> Result<(), ClientError> {
        let began = self.transfers.now_ns();
        self.servers.push(gradient, bytes)?;
        let num_bytes = bytes.iter().map(Vec::len).sum();
        self.transfers.pushed(num_bytes, began);
        Ok(())
    }

    fn pull(&mut self, version: u64) -> Result<Pulled, ClientError> {
        let began = self.transfers.now_ns();
        let pulled = self.servers.pull(version)?;
        let num_bytes = pulled.servers.iter().map(Vec::len).sum();
        self.transfers.pulled(num_bytes, began);
        Ok(pulled)
    }

    fn take(
        &mut self,
        answers: &SyncSender<Result<Option<Work>, ClientError>>,
    ) -> Result<(), ClientError> {
        let answer = match self.servers.take()? {
            Taken::NotYet => return Ok(()),
            Taken::Done => None,
            Taken::Work(piece, version) => Some(Work {
                piece,
                parameters: self.pull(version)?,
            }),
        };
        self.num_wanted -= 1;
        let _ = answers.send(Ok(answer));
        Ok(())
    }
}
