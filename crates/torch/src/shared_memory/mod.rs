//! Direct collectives between the ranks of one node, through memory that they share.
//!
//! Every rank has a segment, which it writes and its peers read. A collective is a sequence of rounds: every rank writes
//! the data of a round to a slot of its segment, waits until all peers have written theirs, and reads what it needs. A
//! segment has two slots, so that a rank writes the next round while peers still read this one.
//!
//! Nothing is sent over loopback, which copies all data twice more and takes time of the kernel and of Gloo's threads on
//! the cores that the ranks compute with. The connections of the group stay: they tell who is gone.

mod collectives;
mod rounds;
mod segment;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::Result;
use crate::sockets::WireBytes;
use crate::store::{Store, millis};
use segment::{Address, Segment};

pub(crate) use collectives::SharedGroup;

/// The segments of all ranks of a group.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    index: usize,
    segments: Vec<Segment>,
    timeout_ms: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

impl SharedMemory {
    /// Shares memory with all ranks of a group; `None` if they are not on one node, for all of them.
    pub(crate) fn connect(
        store: &Store,
        index: usize,
        size: usize,
        timeout: Duration,
    ) -> Result<Option<SharedMemory>> {
        let own = Segment::create();
        let address = own.as_ref().map(|(_, address, _)| address.to_string());
        store.set(
            &format!("segment {index}"),
            address.unwrap_or_default().as_bytes(),
        )?;
        let opened = match own {
            Ok(own) => open_all(store, own, index, size)?,
            Err(_) => None,
        };
        let answer: &[u8] = if opened.is_some() { b"yes" } else { b"no" };
        store.set(&format!("opened {index}"), answer)?;
        let mut all = true;
        for peer in 0..size {
            all &= store.get(&format!("opened {peer}"))? == b"yes";
        }
        // The descriptor stays open until here, when all peers have used it.
        Ok(opened
            .filter(|_| all)
            .map(|(segments, _fd)| SharedMemory::new(index, segments, timeout)))
    }

    fn new(index: usize, segments: Vec<Segment>, timeout: Duration) -> SharedMemory {
        SharedMemory {
            index,
            segments,
            timeout_ms: AtomicU64::new(millis(timeout)),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    /// Sets how long a rank waits for its peers.
    pub(crate) fn set_timeout(&self, timeout: Duration) {
        self.timeout_ms.store(millis(timeout), Ordering::Relaxed);
    }

    /// The bytes that peers have read from this rank, and this rank from peers.
    pub(crate) fn wire_bytes(&self) -> WireBytes {
        WireBytes {
            sent: self.sent.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
        }
    }
}

/// The segments of all ranks, and the descriptor of this rank's; `None` if one cannot be opened.
fn open_all(
    store: &Store,
    (own, _, fd): (Segment, Address, OwnedFd),
    index: usize,
    size: usize,
) -> Result<Option<(Vec<Segment>, OwnedFd)>> {
    let mut own = Some(own);
    let mut segments = Vec::with_capacity(size);
    for rank in 0..size {
        let text = store.get(&format!("segment {rank}"))?;
        let segment = match own.take_if(|_| rank == index) {
            Some(own) => Some(own),
            None => open(&text),
        };
        let Some(segment) = segment else {
            return Ok(None);
        };
        segments.push(segment);
    }
    Ok(Some((segments, fd)))
}

fn open(address: &[u8]) -> Option<Segment> {
    let address: Address = std::str::from_utf8(address).ok()?.parse().ok()?;
    Segment::open(&address).ok()
}
