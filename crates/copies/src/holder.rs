//! The holder: keeps files in memory for whoever knows the run's secret.
//!
//! It outlives the workers, as a thread of the launcher or as a process of its own, so what they have
//! given it is there when they start again. A thread serves each connection. A file is seen when it is
//! finished, whole; what a connection leaves unfinished goes with it.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::Secret;
use crate::guests::{Guests, Place};
use crate::link::Link;
use crate::shelf::{Draft, Full, Shelf};
use crate::wire::{CHUNK, LONGEST, Reply, Request};

/// How long a client may be silent; it connects again when it needs to.
const IDLE: Duration = Duration::from_secs(120);
/// How long to wait when the system has no room for another connection.
const BREATH: Duration = Duration::from_millis(50);
const STACK: usize = 512 << 10;
/// So many refusals are told one by one.
const TOLD: u64 = 16;

/// Why there is no holder.
#[derive(Debug, thiserror::Error)]
#[error("no holder of copies at {address}: {source}")]
pub struct HolderError {
    /// Where it was to be.
    pub address: String,
    /// What the system said.
    pub source: io::Error,
}

/// A holder that runs. Dropping it ends it, and what it kept is gone.
#[derive(Debug)]
pub struct Holder {
    address: SocketAddr,
    house: Arc<House>,
    accepting: Option<JoinHandle<()>>,
}

/// What the threads of a holder share.
#[derive(Debug)]
struct House {
    secret: Secret,
    shelf: Arc<Shelf>,
    guests: Arc<Guests>,
    num_refused: AtomicU64,
    is_over: AtomicBool,
}

impl Holder {
    /// Listens at `address`, a host and a port, and nowhere else; port 0 is any free one. Keeps at most
    /// `capacity` bytes.
    pub fn start(address: &str, capacity: u64, secret: Secret) -> Result<Holder, HolderError> {
        let failed = |source| HolderError {
            address: address.to_owned(),
            source,
        };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let house = Arc::new(House {
            secret,
            shelf: Arc::new(Shelf::new(capacity)),
            guests: Arc::default(),
            num_refused: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        });
        let accepting = thread::Builder::new().name("holder".to_owned()).spawn({
            let house = Arc::clone(&house);
            move || house.accept(&listener)
        });
        Ok(Holder {
            address: bound,
            house,
            accepting: Some(accepting.map_err(failed)?),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes it keeps.
    pub fn num_bytes(&self) -> u64 {
        self.house.shelf.used()
    }

    /// Connections it did not let in.
    pub fn num_refused(&self) -> u64 {
        self.house.num_refused.load(Ordering::Relaxed)
    }

    /// Waits for ever.
    pub fn serve(mut self) {
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.house.is_over.store(true, Ordering::Relaxed);
        self.house.guests.close();
        // Wakes the thread that accepts, so that it looks.
        let woken = TcpStream::connect_timeout(&self.address, Duration::from_secs(1)).is_ok();
        if let Some(accepting) = self.accepting.take().filter(|_| woken) {
            let _ = accepting.join();
        }
    }
}

impl House {
    fn accept(self: &Arc<House>, listener: &TcpListener) {
        loop {
            let accepted = listener.accept();
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            match accepted {
                Ok((stream, from)) => self.welcome(stream, from),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    self.refuse("a connection", &error);
                    thread::sleep(BREATH);
                }
            }
        }
    }

    fn welcome(self: &Arc<House>, stream: TcpStream, from: SocketAddr) {
        let Some(place) = self.guests.admit(&stream) else {
            return self.refuse(from, &io::Error::other("too many are connected"));
        };
        let house = Arc::clone(self);
        let thread = thread::Builder::new().name("holder of copies".to_owned());
        let spawned = thread
            .stack_size(STACK)
            .spawn(move || house.entertain(stream, from, &place));
        if let Err(error) = spawned {
            self.refuse(from, &error);
        }
    }

    fn entertain(&self, stream: TcpStream, from: SocketAddr, place: &Place) {
        let link = match Link::accept(stream, &self.secret) {
            Ok(_) if !place.prove() => Err(io::Error::other("too many are connected")),
            link => link,
        };
        match link {
            Ok(link) => self.serve(link, from),
            Err(error) => self.refuse(from, &error),
        }
    }

    /// Answers until the client leaves, or is silent for long.
    fn serve(&self, mut link: Link, from: SocketAddr) {
        let mut desk = Desk::new(&self.shelf);
        loop {
            let message = match link.receive_within(IDLE) {
                Ok(message) => message,
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    return tracing::warn!("holder: {from} is dropped: {error}");
                }
                Err(_) => return,
            };
            let request = match Request::decode(&message) {
                Ok(request) => request,
                Err(error) => return tracing::warn!("holder: {from} is dropped: {error}"),
            };
            if let Some(answer) = desk.answer(request)
                && link.send(&answer).is_err()
            {
                return;
            }
        }
    }

    /// Tells of somebody who was not let in; of many, not of every one.
    fn refuse(&self, from: impl Display, error: &io::Error) {
        let number = 1 + self.num_refused.fetch_add(1, Ordering::Relaxed);
        if number <= TOLD || number.is_power_of_two() {
            tracing::warn!("holder: {from} is refused ({number} so far): {error}");
        }
    }
}

/// One client's business.
struct Desk<'a> {
    shelf: &'a Arc<Shelf>,
    /// The file it is writing; once it was refused, the rest is passed over.
    draft: Option<Result<Draft, Full>>,
}

impl<'a> Desk<'a> {
    fn new(shelf: &'a Arc<Shelf>) -> Desk<'a> {
        Desk { shelf, draft: None }
    }

    /// Does what is asked; the answer, where there is one.
    fn answer(&mut self, request: Request<'_>) -> Option<Vec<u8>> {
        let shelf = self.shelf;
        let answer = match request {
            Request::Create { path } => {
                // The one before gives its memory back first.
                self.draft = None;
                self.draft = Some(shelf.create(path));
                return None;
            }
            Request::Append { bytes } => {
                self.append(bytes);
                return None;
            }
            Request::Finish => return Some(self.finish()),
            Request::Size { path } => shelf
                .size(path)
                .map_or(Reply::Missing, Reply::Size)
                .encode(),
            Request::Read {
                path,
                start,
                length,
            } => {
                let length = length.min(CHUNK as u64) as usize;
                let bytes = shelf.read(path, start, length);
                let bytes = bytes.as_deref();
                bytes.map_or(Reply::Missing, Reply::Bytes).encode()
            }
            Request::List { folder } => names(&shelf.list(folder)),
            Request::Remove { path } => {
                shelf.remove(path);
                Reply::Done.encode()
            }
            Request::RemoveFolder { folder } => {
                shelf.remove_folder(folder);
                Reply::Done.encode()
            }
        };
        Some(answer)
    }

    fn append(&mut self, bytes: &[u8]) {
        if let Some(Ok(draft)) = &mut self.draft
            && let Err(full) = draft.append(bytes)
        {
            self.draft = Some(Err(full));
        }
    }

    fn finish(&mut self) -> Vec<u8> {
        match self.draft.take() {
            Some(Ok(draft)) => {
                draft.finish();
                Reply::Done.encode()
            }
            Some(Err(full)) => Reply::Refused(&full.to_string()).encode(),
            None => Reply::Refused("no file was begun").encode(),
        }
    }
}

fn names(names: &BTreeSet<String>) -> Vec<u8> {
    let reply = Reply::Names(names.iter().map(String::as_str).collect()).encode();
    match reply.len() <= LONGEST {
        true => reply,
        false => Reply::Refused("the folder has too many names").encode(),
    }
}
