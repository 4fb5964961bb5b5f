//! The client of one replica server.
//!
//! The client keeps a connection between requests. It backs off exponentially from a server that it cannot reach, so
//! a dead node costs a timeout now and then and not one per block. It logs once that the server is gone, and once
//! that it is back.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use trainyard_tls::ClientStream;

use crate::wire::{PROTOCOL, Reply, Request};

/// The first pause after a failure.
const MIN_BACKOFF: Duration = Duration::from_secs(10);
/// The longest pause between two attempts.
const MAX_BACKOFF: Duration = Duration::from_secs(320);

/// The replica server at an address.
#[derive(Debug)]
pub(crate) struct Peer {
    address: String,
    tls: Arc<ClientConfig>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    idle: Option<ClientStream>,
    /// Set while the server cannot be reached.
    backoff: Option<Backoff>,
}

/// When to try an unreachable server again.
#[derive(Clone, Copy, Debug)]
struct Backoff {
    until: Instant,
    pause: Duration,
}

impl Backoff {
    fn after(last: Option<Backoff>) -> Backoff {
        let pause = last.map_or(MIN_BACKOFF, |last| MAX_BACKOFF.min(2 * last.pause));
        Backoff {
            until: Instant::now() + pause,
            pause,
        }
    }
}

/// A file that is being sent to one replica server.
#[derive(Debug)]
pub(crate) struct Upload {
    pub address: String,
    stream: ClientStream,
}

impl Peer {
    pub(crate) fn new(address: String, tls: Arc<ClientConfig>) -> Peer {
        Peer {
            address,
            tls,
            state: Mutex::default(),
        }
    }

    /// Sends a request; what `extract` finds in the reply.
    pub(crate) fn request<T>(
        &self,
        request: Request<'_>,
        extract: impl Fn(Reply<'_>) -> Option<T>,
    ) -> io::Result<T> {
        let mut state = self.state();
        let message = request.encode();
        // The server may have closed an idle connection, which shows only when it is used.
        let idle = state.idle.take();
        let idle =
            idle.and_then(|mut stream| Some((exchange(&mut stream, &message).ok()?, stream)));
        let (reply, stream) = match idle {
            Some(answered) => answered,
            None => self.connect(&mut state, |stream| exchange(stream, &message))?,
        };
        state.idle = Some(stream);
        match Reply::decode(&reply).map_err(io::Error::other)? {
            Reply::Rejected(reason) => Err(io::Error::other(reason.to_owned())),
            reply => extract(reply).ok_or_else(unexpected_reply),
        }
    }

    /// Starts a file, on a connection of its own: the server discards the file if the connection ends early.
    pub(crate) fn start_upload(&self, path: &str) -> io::Result<Upload> {
        let create = Request::Create { path }.encode();
        let ((), stream) = self.connect(&mut self.state(), |stream| stream.send(&create))?;
        Ok(Upload {
            address: self.address.clone(),
            stream,
        })
    }

    /// Connects and calls `act`; if either fails, backs off.
    fn connect<T>(
        &self,
        state: &mut State,
        act: impl FnOnce(&mut ClientStream) -> io::Result<T>,
    ) -> io::Result<(T, ClientStream)> {
        let last = state.backoff;
        if last.is_some_and(|backoff| Instant::now() < backoff.until) {
            let reason = format!(
                "replica server {} was unreachable a moment ago",
                self.address
            );
            return Err(io::Error::new(io::ErrorKind::NotConnected, reason));
        }
        let connected = ClientStream::connect(&self.address, &self.tls, PROTOCOL);
        let connected = connected.and_then(|mut stream| Ok((act(&mut stream)?, stream)));
        state.backoff = connected.is_err().then(|| Backoff::after(last));
        match &connected {
            Ok(_) if last.is_some() => {
                tracing::info!("replica server {} is reachable again", self.address)
            }
            Err(error) if last.is_none() => {
                tracing::warn!(
                    "continuing without replica server {}: {error}",
                    self.address
                );
            }
            _ => {}
        }
        connected.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", self.address)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Upload {
    pub(crate) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.send(&Request::Append { bytes }.encode())
    }

    /// Sends the end of the file.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        self.stream.send(&Request::Finish.encode())
    }

    /// Waits until the server has the complete file.
    pub(crate) fn confirm(mut self) -> io::Result<()> {
        match Reply::decode(&self.stream.receive()?).map_err(io::Error::other)? {
            Reply::Done => Ok(()),
            Reply::Rejected(reason) => Err(io::Error::other(reason.to_owned())),
            _ => Err(unexpected_reply()),
        }
    }
}

fn exchange(stream: &mut ClientStream, message: &[u8]) -> io::Result<Vec<u8>> {
    stream.send(message)?;
    stream.receive()
}

fn unexpected_reply() -> io::Error {
    io::Error::other("the reply does not match the request")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backoff_doubles_up_to_a_limit() {
        let mut backoff = None;
        let pauses: Vec<u64> = (0..8)
            .map(|_| backoff.insert(Backoff::after(backoff)).pause.as_secs())
            .collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 320, 320]);
    }
}
