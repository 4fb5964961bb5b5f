//! A worker's connections to all parameter servers.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use rustls::ClientConfig;
use trainyard_tls::{ClientStream, Identity, RunSecret, Service, TlsError};

use crate::chunks::{receive_chunks, send_chunks};
use crate::protocol::{JobInfo, PROTOCOL, PieceGradient, Pulled, Reply, Request, Taken};
use crate::rows::Rows;
use crate::work_queue::WorkerId;

/// How often a worker renews its lease: well before it ends.
pub const LEASE_RENEWAL: Duration = Duration::from_secs(2);

/// A worker and a server cannot work together.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The connection has failed: the worker may connect again.
    #[error("parameter server {address}: cannot {operation}: {source}")]
    Connection {
        /// The server.
        address: String,
        /// What the worker was doing.
        operation: &'static str,
        /// What has happened.
        source: io::Error,
    },
    /// The server belongs to another job.
    #[error(
        "parameter server {address} has another config or program: start servers and workers with the same command"
    )]
    OtherJob {
        /// The server.
        address: String,
    },
    /// The server does not accept a request.
    #[error("parameter server {address} rejected the request to {operation}: {reason}")]
    Rejected {
        /// The server.
        address: String,
        /// What the worker was doing.
        operation: &'static str,
        /// Why it was rejected.
        reason: String,
    },
    /// TLS cannot be set up.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

impl ClientError {
    /// Whether the worker may join again.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            ClientError::Connection { .. } | ClientError::Rejected { .. }
        )
    }
}

type Result<T> = std::result::Result<T, ClientError>;

/// The servers of a run, as a worker that has joined reaches them.
#[derive(Debug)]
pub struct ServerGroup {
    /// The leader first.
    servers: Vec<Server>,
    jobs: Vec<JobInfo>,
    worker: WorkerId,
}

#[derive(Debug)]
struct Server {
    address: String,
    stream: ClientStream,
}

impl ServerGroup {
    /// Connects to all servers and joins the run. `digest` is that of the worker's own config and program.
    pub fn join(addresses: &[String], secret: &RunSecret, digest: &str) -> Result<ServerGroup> {
        let tls = Identity::new(secret, Service::ParameterServer, "")?.client_config()?;
        let connect = |address: &String| Server::connect(address, &tls);
        let mut servers = addresses.iter().map(connect).collect::<Result<Vec<_>>>()?;
        let jobs = servers.iter_mut().map(|server| server.describe(digest));
        let jobs = jobs.collect::<Result<Vec<_>>>()?;
        let worker = match servers.first_mut() {
            Some(leader) => leader.join()?,
            None => WorkerId(0),
        };
        Ok(ServerGroup {
            servers,
            jobs,
            worker,
        })
    }

    /// The number that the leader has given to this worker.
    pub fn worker(&self) -> WorkerId {
        self.worker
    }

    /// What every server holds, the leader first.
    pub fn jobs(&self) -> &[JobInfo] {
        &self.jobs
    }

    /// Asks for the next piece, and waits for it for a moment.
    pub fn take(&mut self) -> Result<Taken> {
        let Some(leader) = self.servers.first_mut() else {
            return Ok(Taken::Done);
        };
        match leader.request(&Request::Take, "take work")? {
            Reply::Piece { piece, version } => Ok(Taken::Work(piece, version)),
            Reply::Done => Ok(Taken::Done),
            _ => Ok(Taken::NotYet),
        }
    }

    /// Pulls the parameters of all servers, after at least `version` updates: of tables these rows.
    pub fn pull(&mut self, version: u64, rows: &Rows) -> Result<Pulled> {
        let pulled = for_each(&mut self.servers, |_, server| server.pull(version, rows))?;
        Ok(Pulled {
            version: pulled.first().map_or(0, |(version, _)| *version),
            servers: pulled.into_iter().map(|(_, bytes)| bytes).collect(),
        })
    }

    /// Pushes a gradient: to every server the bytes of its shards, of tables those of these rows, to the leader last.
    pub fn push(&mut self, gradient: PieceGradient, rows: &Rows, bytes: &[Vec<u8>]) -> Result<()> {
        let Some((leader, others)) = self.servers.split_first_mut() else {
            return Ok(());
        };
        let push =
            |index: usize, server: &mut Server| server.push(gradient, rows, &bytes[index + 1]);
        // A slow network may take longer than a lease.
        leader.renew_lease_while(|| for_each(others, push))??;
        leader.push(gradient, rows, &bytes[0])
    }

    /// Calls `act`, and renews the worker's lease meanwhile.
    pub fn renew_lease_while<T: Send>(&mut self, act: impl FnOnce() -> T + Send) -> Result<T> {
        match self.servers.first_mut() {
            Some(leader) => leader.renew_lease_while(act),
            None => Ok(act()),
        }
    }

    /// Renews the worker's lease.
    pub fn renew_lease(&mut self) -> Result<()> {
        self.servers.first_mut().map_or(Ok(()), Server::renew_lease)
    }
}

/// Calls `act` for all servers at once.
fn for_each<T: Send>(
    servers: &mut [Server],
    act: impl Fn(usize, &mut Server) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    match servers {
        [] => return Ok(Vec::new()),
        [server] => return Ok(vec![act(0, server)?]),
        _ => {}
    }
    let act = &act;
    thread::scope(|scope| {
        let threads: Vec<_> = servers
            .iter_mut()
            .enumerate()
            .map(|(index, server)| scope.spawn(move || act(index, server)))
            .collect();
        threads.into_iter().map(joined).collect()
    })
}

/// The result of a thread, which panics only if this one is to panic too.
fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    match thread.join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

impl Server {
    fn connect(address: &str, tls: &Arc<ClientConfig>) -> Result<Server> {
        let stream = ClientStream::connect(address, tls, PROTOCOL);
        let stream = stream.map_err(|source| ClientError::Connection {
            address: address.to_owned(),
            operation: "connect",
            source,
        })?;
        Ok(Server {
            address: address.to_owned(),
            stream,
        })
    }

    fn describe(&mut self, digest: &str) -> Result<JobInfo> {
        match self.request(&Request::Describe, "ask what it holds")? {
            Reply::Job(job) if job.digest == digest => Ok(job),
            _ => Err(ClientError::OtherJob {
                address: self.address.clone(),
            }),
        }
    }

    fn join(&mut self) -> Result<WorkerId> {
        const OPERATION: &str = "join";
        match self.request(&Request::Join, OPERATION)? {
            Reply::Joined(worker) => Ok(worker),
            reply => Err(self.unexpected(OPERATION, &reply)),
        }
    }

    fn pull(&mut self, version: u64, rows: &Rows) -> Result<(u64, Vec<u8>)> {
        const OPERATION: &str = "pull parameters";
        let num_rows = rows.len();
        let request = Request::Pull { version, num_rows };
        loop {
            let sent = send(&mut self.stream, &request);
            let sent = sent.and_then(|()| self.send_bytes(&rows.to_bytes()));
            sent.map_err(|source| self.failed(OPERATION, source))?;
            match self.reply(OPERATION)? {
                Reply::NotYet => {}
                Reply::Parameters { version, num_bytes } => {
                    let bytes = receive_chunks(num_bytes, || self.stream.receive());
                    return Ok((
                        version,
                        bytes.map_err(|source| self.failed(OPERATION, source))?,
                    ));
                }
                reply => return Err(self.unexpected(OPERATION, &reply)),
            }
        }
    }

    fn push(&mut self, gradient: PieceGradient, rows: &Rows, bytes: &[u8]) -> Result<()> {
        const OPERATION: &str = "push a gradient";
        let num_rows = rows.len();
        let sent = send(&mut self.stream, &Request::Push { gradient, num_rows })
            .and_then(|()| self.send_bytes(&rows.to_bytes()))
            .and_then(|()| self.send_bytes(bytes));
        sent.map_err(|source| self.failed(OPERATION, source))?;
        match self.reply(OPERATION)? {
            Reply::Received => Ok(()),
            reply => Err(self.unexpected(OPERATION, &reply)),
        }
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        let everything = 0..bytes.len();
        send_chunks(bytes, &[everything], |chunk| self.stream.send(chunk))
    }

    fn renew_lease(&mut self) -> Result<()> {
        self.request(&Request::Heartbeat, "renew its lease")?;
        Ok(())
    }

    fn renew_lease_while<T: Send>(&mut self, act: impl FnOnce() -> T + Send) -> Result<T> {
        let (ending, ended) = channel::<()>();
        thread::scope(|scope| {
            let thread = scope.spawn(move || {
                let result = act();
                drop(ending);
                result
            });
            while ended.recv_timeout(LEASE_RENEWAL) == Err(RecvTimeoutError::Timeout) {
                self.renew_lease()?;
            }
            Ok(joined(thread))
        })
    }

    fn request(&mut self, request: &Request, operation: &'static str) -> Result<Reply> {
        let sent = send(&mut self.stream, request);
        sent.map_err(|source| self.failed(operation, source))?;
        self.reply(operation)
    }

    fn reply(&mut self, operation: &'static str) -> Result<Reply> {
        let reply = self.stream.receive();
        let reply =
            reply.and_then(|reply| serde_json::from_slice(&reply).map_err(io::Error::other));
        match reply.map_err(|source| self.failed(operation, source))? {
            Reply::Rejected(reason) => Err(ClientError::Rejected {
                address: self.address.clone(),
                operation,
                reason,
            }),
            reply => Ok(reply),
        }
    }

    fn failed(&self, operation: &'static str, source: io::Error) -> ClientError {
        ClientError::Connection {
            address: self.address.clone(),
            operation,
            source,
        }
    }

    fn unexpected(&self, operation: &'static str, reply: &Reply) -> ClientError {
        self.failed(
            operation,
            io::Error::other(format!("unexpected reply {reply:?}")),
        )
    }
}

fn send(stream: &mut ClientStream, request: &Request) -> io::Result<()> {
    stream.send(&serde_json::to_vec(request).map_err(io::Error::other)?)
}
