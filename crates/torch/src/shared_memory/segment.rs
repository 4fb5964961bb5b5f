//! The memory of one rank that other ranks of its node read: a header with two counters, and two slots of data.
//!
//! The memory has no name in the file system: peers open it through `/proc`, and the kernel frees it with the last
//! process, however that ends.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{MemfdFlags, Timespec, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;

/// The bytes of a slot. Twice as much, the next one included, still fits the cache of a core.
pub(super) const SLOT_BYTES: usize = 1 << 19;
const HEADER_BYTES: usize = 4096;
const NUM_SLOTS: usize = 2;

/// A segment that this process has mapped.
#[derive(Debug)]
pub(super) struct Segment {
    header: NonNull<Header>,
    data: NonNull<u8>,
}

// SAFETY: the header has atomics only, and `slot` and `slot_mut` say who may use the data when.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

#[repr(C)]
#[derive(Debug)]
struct Header {
    /// The number of rounds whose data the owner has written.
    written: Counter,
    /// The number of rounds in which the owner has read the data of all ranks.
    read: Counter,
    /// What the slots contain.
    announced: [[AtomicU64; 3]; NUM_SLOTS],
}

/// A counter for which other processes wait. It wraps around.
#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct Counter {
    value: AtomicU32,
    num_waiting: AtomicU32,
}

/// What a rank says about the data in a slot, so that ranks in different collectives notice.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Announcement {
    /// The kind of the collective.
    pub kind: u64,
    /// The number of the collective in its group.
    pub sequence: u64,
    /// What it says beyond that.
    pub detail: u64,
}

/// Where peers find a segment.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Address {
    /// Distinguishes hosts, and namespaces of processes and of the network on one host.
    namespace: String,
    pid: u32,
    fd: i32,
    inode: u64,
}

impl Segment {
    /// Creates the segment of this rank. It can be opened at the address as long as the descriptor is open.
    pub(super) fn create() -> io::Result<(Segment, Address, OwnedFd)> {
        let fd = memfd_create("trainyard", MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, (HEADER_BYTES + NUM_SLOTS * SLOT_BYTES) as u64)?;
        let address = Address {
            namespace: namespace()?,
            pid: std::process::id(),
            fd: fd.as_raw_fd(),
            inode: rustix::fs::fstat(&fd)?.st_ino,
        };
        let segment = Segment::map(&fd, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok((segment, address, fd))
    }

    /// Opens the segment of a peer; fails if the peer is on another host, or out of reach.
    pub(super) fn open(address: &Address) -> io::Result<Segment> {
        let missing = |what: &str| io::Error::new(io::ErrorKind::NotFound, what);
        if address.namespace != namespace()? {
            return Err(missing("the peer is on another host"));
        }
        let path = format!("/proc/{}/fd/{}", address.pid, address.fd);
        let file = File::options().read(true).write(true).open(path)?;
        if file.metadata()?.ino() != address.inode {
            return Err(missing("the peer has closed its segment"));
        }
        Segment::map(&file.into(), ProtFlags::READ)
    }

    /// Another mapping of this rank's own segment.
    #[cfg(test)]
    pub(super) fn create_from(fd: &OwnedFd) -> io::Result<Segment> {
        Segment::map(fd, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn map(fd: &OwnedFd, data: ProtFlags) -> io::Result<Segment> {
        let map = |bytes, protection, offset: usize| {
            let offset = offset as u64;
            // SAFETY: a new mapping of a file of this size, which no process shrinks.
            unsafe {
                mmap(
                    std::ptr::null_mut(),
                    bytes,
                    protection,
                    MapFlags::SHARED,
                    fd,
                    offset,
                )
            }
        };
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let header = map(HEADER_BYTES, both, 0)?.cast();
        let data = map(NUM_SLOTS * SLOT_BYTES, data, HEADER_BYTES)?.cast();
        match (NonNull::new(header), NonNull::new(data)) {
            (Some(header), Some(data)) => Ok(Segment { header, data }),
            _ => Err(io::Error::other("mmap returned no memory")),
        }
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping is as large as a header, lives as long as `self`, and zeros are a valid header.
        unsafe { self.header.as_ref() }
    }

    /// The rounds that the owner has written.
    pub(super) fn written(&self) -> &Counter {
        &self.header().written
    }

    /// The rounds that the owner has read.
    pub(super) fn read(&self) -> &Counter {
        &self.header().read
    }

    pub(super) fn announce(&self, round: u32, what: Announcement) {
        let values = [what.kind, what.sequence, what.detail];
        for (word, value) in self.announced(round).iter().zip(values) {
            word.store(value, Ordering::Relaxed);
        }
    }

    pub(super) fn announcement(&self, round: u32) -> Announcement {
        let [kind, sequence, detail] = self
            .announced(round)
            .each_ref()
            .map(|word| word.load(Ordering::Relaxed));
        Announcement {
            kind,
            sequence,
            detail,
        }
    }

    fn announced(&self, round: u32) -> &[AtomicU64; 3] {
        &self.header().announced[round as usize % NUM_SLOTS]
    }

    /// The data of a round.
    ///
    /// # Safety
    ///
    /// The owner must have written the round, and must not begin the round after the next one before the slice is dropped.
    pub(super) unsafe fn slot(&self, round: u32) -> &[u8] {
        // SAFETY: within the mapping; the caller ensures that no process writes to it.
        unsafe { std::slice::from_raw_parts(self.slot_start(round), SLOT_BYTES) }
    }

    /// The slot for the data of a round.
    ///
    /// # Safety
    ///
    /// The segment must be this process's own; all ranks must have read the round before the last one, no rank may
    /// have begun to read the given one, and there must be no other slice of it.
    #[expect(
        clippy::mut_from_ref,
        reason = "the memory is not that of `self`, and the caller ensures that the slice is unique"
    )]
    pub(super) unsafe fn slot_mut(&self, round: u32) -> &mut [u8] {
        // SAFETY: within the mapping; the caller ensures that no other slice of the slot is in use.
        unsafe { std::slice::from_raw_parts_mut(self.slot_start(round), SLOT_BYTES) }
    }

    fn slot_start(&self, round: u32) -> *mut u8 {
        let offset = (round as usize % NUM_SLOTS) * SLOT_BYTES;
        // SAFETY: both slots lie within the mapping.
        unsafe { self.data.as_ptr().add(offset) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: these are the mappings of `map`; slices of them borrow `self`.
        unsafe {
            let _ = munmap(self.header.as_ptr().cast(), HEADER_BYTES);
            let _ = munmap(self.data.as_ptr().cast(), NUM_SLOTS * SLOT_BYTES);
        }
    }
}

impl Counter {
    pub(super) fn get(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Sets the counter and wakes who waits for it.
    pub(super) fn set(&self, value: u32) {
        // Sequentially consistent, so that either this sees a waiting process, or that one sees the value.
        self.value.store(value, Ordering::SeqCst);
        if self.num_waiting.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&self.value, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Waits until the counter has reached a value, but not for much longer than `limit`. Returns whether it has.
    pub(super) fn wait_for(&self, value: u32, limit: Duration) -> bool {
        let now = self.get();
        if has_reached(now, value) {
            return true;
        }
        let limit = Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        self.num_waiting.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wait(&self.value, futex::Flags::empty(), now, Some(&limit));
        self.num_waiting.fetch_sub(1, Ordering::SeqCst);
        has_reached(self.get(), value)
    }
}

/// Whether a counter that wraps around is at a value or beyond it.
fn has_reached(counter: u32, value: u32) -> bool {
    counter.wrapping_sub(value) < u32::MAX / 2
}

/// What processes of one node have in common. Those with other networks on the same host are other nodes.
fn namespace() -> io::Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let namespace = |kind: &str| std::fs::read_link(format!("/proc/self/ns/{kind}"));
    let (processes, network) = (namespace("pid")?, namespace("net")?);
    let boot = boot.trim();
    Ok(format!(
        "{boot}/{}/{}",
        processes.display(),
        network.display()
    ))
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Address {
            namespace,
            pid,
            fd,
            inode,
        } = self;
        write!(f, "{namespace} {pid} {fd} {inode}")
    }
}

impl FromStr for Address {
    type Err = io::Error;

    fn from_str(text: &str) -> io::Result<Address> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, format!("no segment: {text}"));
        let mut words = text.split(' ');
        let mut word = || words.next().ok_or_else(invalid);
        Ok(Address {
            namespace: word()?.to_owned(),
            pid: word()?.parse().map_err(|_| invalid())?,
            fd: word()?.parse().map_err(|_| invalid())?,
            inode: word()?.parse().map_err(|_| invalid())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_reads_what_the_owner_writes() {
        let (own, address, fd) = Segment::create().unwrap();
        let peer = Segment::open(&address.to_string().parse().unwrap()).unwrap();
        drop(fd);
        // SAFETY: this test is the only user, and the slice ends with the statement.
        unsafe { own.slot_mut(3)[7] = 5 };
        own.written().set(4);
        assert!(peer.written().wait_for(4, Duration::ZERO));
        assert!(!peer.written().wait_for(5, Duration::from_millis(1)));
        // SAFETY: as above.
        assert_eq!(unsafe { peer.slot(3)[7] }, 5);
    }

    #[test]
    fn a_descriptor_of_another_file_is_not_a_segment() {
        let (_own, address, fd) = Segment::create().unwrap();
        drop(fd);
        assert!(Segment::open(&address).is_err());
        let (_own, address, _fd) = Segment::create().unwrap();
        let elsewhere = Address {
            namespace: "another host".to_owned(),
            ..address
        };
        assert!(Segment::open(&elsewhere).is_err());
    }

    #[test]
    fn counters_wrap_around() {
        assert!(has_reached(1, u32::MAX));
        assert!(!has_reached(u32::MAX, 1));
        assert!(has_reached(7, 7));
        assert!(has_reached(0, u32::MAX));
    }
}
