//! One holder, as a client sees it: there, or away.
//!
//! A connection is kept between questions. A holder that cannot be reached is left alone for a while,
//! and then for longer and longer, so that a dead host costs a time-out now and then and not one for
//! every block; that it is gone, and that it is back, is told once.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::Secret;
use crate::link::Link;
use crate::wire::{Reply, Request};

/// How long one who is away is not asked again: at first, and at last.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const LAST_PAUSE: Duration = Duration::from_secs(320);

/// A holder at an address.
#[derive(Debug)]
pub(crate) struct Peer {
    address: String,
    secret: Secret,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    kept: Option<Link>,
    away: Option<Away>,
}

/// Since a holder could not be reached.
#[derive(Clone, Copy, Debug)]
struct Away {
    until: Instant,
    pause: Duration,
}

impl Away {
    fn again(before: Option<Away>) -> Away {
        let pause = before.map_or(FIRST_PAUSE, |away| LAST_PAUSE.min(2 * away.pause));
        Away {
            until: Instant::now() + pause,
            pause,
        }
    }
}

/// A file on its way to one holder.
#[derive(Debug)]
pub(crate) struct Upload {
    pub address: String,
    link: Link,
}

impl Peer {
    pub(crate) fn new(address: String, secret: Secret) -> Peer {
        Peer {
            address,
            secret,
            state: Mutex::default(),
        }
    }

    /// Asks, and takes from the answer what `take` finds in it.
    pub(crate) fn ask<T>(
        &self,
        request: Request<'_>,
        take: impl Fn(Reply<'_>) -> Option<T>,
    ) -> io::Result<T> {
        let mut state = self.state();
        let question = request.encode();
        // One that was kept may have been closed meanwhile, which only using it tells.
        let kept = state.kept.take();
        let kept = kept.and_then(|mut link| Some((exchange(&mut link, &question).ok()?, link)));
        let (answer, link) = match kept {
            Some(answered) => answered,
            None => self.reach(&mut state, |link| exchange(link, &question))?,
        };
        state.kept = Some(link);
        match Reply::decode(&answer).map_err(io::Error::other)? {
            Reply::Refused(reason) => Err(io::Error::other(reason.to_owned())),
            reply => take(reply).ok_or_else(|| io::Error::other("an answer to another question")),
        }
    }

    /// Begins a file, over a connection of its own: what is not finished goes with it.
    pub(crate) fn begin(&self, path: &str) -> io::Result<Upload> {
        let create = Request::Create { path }.encode();
        let ((), link) = self.reach(&mut self.state(), |link| link.send(&create))?;
        Ok(Upload {
            address: self.address.clone(),
            link,
        })
    }

    /// Connects and does something; a failure means that it is away.
    fn reach<T>(
        &self,
        state: &mut State,
        act: impl FnOnce(&mut Link) -> io::Result<T>,
    ) -> io::Result<(T, Link)> {
        let before = state.away;
        if before.is_some_and(|away| Instant::now() < away.until) {
            let reason = format!("the holder {} was away a moment ago", self.address);
            return Err(io::Error::new(io::ErrorKind::NotConnected, reason));
        }
        let connected = Link::connect(&self.address, &self.secret);
        let reached = connected.and_then(|mut link| Ok((act(&mut link)?, link)));
        state.away = reached.is_err().then(|| Away::again(before));
        match &reached {
            Ok(_) if before.is_some() => tracing::info!("the holder {} is back", self.address),
            Err(error) if before.is_none() => {
                tracing::warn!("going on without the holder {}: {error}", self.address);
            }
            _ => {}
        }
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", self.address));
        reached.map_err(named)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Upload {
    pub(crate) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.link.send(&Request::Append { bytes }.encode())
    }

    /// Says that this was all.
    pub(crate) fn end(&mut self) -> io::Result<()> {
        self.link.send(&Request::Finish.encode())
    }

    /// Waits until it is in its place.
    pub(crate) fn confirm(mut self) -> io::Result<()> {
        match Reply::decode(&self.link.receive()?).map_err(io::Error::other)? {
            Reply::Done => Ok(()),
            Reply::Refused(reason) => Err(io::Error::other(reason.to_owned())),
            _ => Err(io::Error::other("an answer to another question")),
        }
    }
}

fn exchange(link: &mut Link, question: &[u8]) -> io::Result<Vec<u8>> {
    link.send(question)?;
    link.receive()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_an_end() {
        let mut away = None;
        let pauses: Vec<u64> = (0..8)
            .map(|_| away.insert(Away::again(away)).pause.as_secs())
            .collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 320, 320]);
    }
}
