//! The rounds of a collective: when a rank may write its slot, and when its peers may read it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use trainyard_trace::CollectiveKind;

use super::SharedMemory;
use super::segment::{Announcement, Counter};
use crate::sockets::Sockets;

pub(super) type Failure = String;

/// How long a rank waits before it looks whether its peers are still there.
const PATIENCE: Duration = Duration::from_millis(50);

/// The rounds of one collective.
pub(super) struct Rounds<'a> {
    pub(super) memory: &'a SharedMemory,
    pub(super) sockets: &'a Sockets,
    pub(super) kind: CollectiveKind,
    /// The number of the collective in its group.
    pub(super) sequence: u64,
}

impl Rounds<'_> {
    /// Writes the data of this rank's next round, and announces `detail` with it.
    pub(super) fn write(
        &self,
        detail: u64,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        // The data of a collective that ended halfway may still be in the slots.
        if self.sockets.is_shut_down() {
            return Err("Socket closed".to_owned());
        }
        let own = &self.memory.segments[self.memory.index];
        let round = own.written().get();
        // The slot held the round before the last one.
        for (rank, peer) in self.memory.segments.iter().enumerate() {
            self.wait(rank, peer.read(), round.wrapping_sub(1))?;
        }
        // SAFETY: the segment is this rank's own; all ranks have read what the slot held, and this rank does not read the
        // round before it is written.
        fill(unsafe { own.slot_mut(round) })?;
        own.announce(round, self.announcement(detail));
        own.written().set(round.wrapping_add(1));
        Ok(())
    }

    /// Reads the data of all ranks in the next round, which this rank has written too. `take` receives every rank's slot
    /// and the detail that it announced.
    pub(super) fn read(
        &self,
        take: impl FnOnce(&[&[u8]], &[u64]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let segments = &self.memory.segments;
        let own = &segments[self.memory.index];
        let round = own.read().get();
        let mut slots = Vec::with_capacity(segments.len());
        let mut details = Vec::with_capacity(segments.len());
        for (rank, peer) in segments.iter().enumerate() {
            self.wait(rank, peer.written(), round.wrapping_add(1))?;
            details.push(self.checked(rank, peer.announcement(round))?);
            // SAFETY: the owner has written the round, and begins the one after the next only when this rank has read it.
            slots.push(unsafe { peer.slot(round) });
        }
        take(&slots, &details)?;
        drop(slots);
        own.read().set(round.wrapping_add(1));
        Ok(())
    }

    fn announcement(&self, detail: u64) -> Announcement {
        Announcement {
            kind: self.kind as u64,
            sequence: self.sequence,
            detail,
        }
    }

    /// The detail that a peer announced, if it is in the same collective.
    fn checked(&self, rank: usize, found: Announcement) -> Result<u64, Failure> {
        if found == self.announcement(found.detail) {
            return Ok(found.detail);
        }
        let mut kinds = CollectiveKind::ALL.into_iter();
        let kind = kinds.find(|kind| *kind as u64 == found.kind);
        let kind = kind.map_or_else(|| "no collective".to_owned(), |kind| kind.to_string());
        Err(format!(
            "rank {rank} of the group is in {kind} #{}: all ranks must issue the same collectives in the same order",
            found.sequence
        ))
    }

    /// Waits until a counter of a peer has a value, the peer is gone, or the timeout is over.
    fn wait(&self, rank: usize, counter: &Counter, value: u32) -> Result<(), Failure> {
        if counter.wait_for(value, PATIENCE) {
            return Ok(());
        }
        let began = Instant::now();
        let timeout = Duration::from_millis(self.memory.timeout_ms.load(Ordering::Relaxed));
        loop {
            let is_broken = self.sockets.is_broken();
            // What a peer has written before it ended counts.
            if counter.wait_for(value, if is_broken { Duration::ZERO } else { PATIENCE }) {
                return Ok(());
            }
            if is_broken {
                return Err("Connection closed by peer".to_owned());
            }
            if began.elapsed() >= timeout {
                let ms = timeout.as_millis();
                return Err(format!(
                    "Timed out waiting {ms}ms for rank {rank} of the group"
                ));
            }
        }
    }
}
