//! The memory in which the ranks of a node keep their heartbeats: an anonymous file of their launcher.
//!
//! A file in `/dev/shm` would do until that is full, read-only or another user's: then a healthy rank would look
//! stopped. This memory has no name and no quota, and its pages are allocated before the first rank starts.
//!
//! Every rank has a slot at a fixed offset: one line of JSON, and one with its CRC-32C in hexadecimal. Ranks write and
//! launchers read without a lock, so a reader may see half of a heartbeat, and tells by the checksum. Programs that
//! are not ours may leave it out. The first page has a flag by which the launcher lets ranks know that their world is
//! broken.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use trainyard_trace::now_ns;

use crate::Heartbeat;

/// The environment variable with the path of the memory.
pub const HEARTBEATS: &str = "TRAINYARD_HEARTBEATS";
/// The environment variable with the offset of the rank's slot.
pub const HEARTBEAT_OFFSET: &str = "TRAINYARD_HEARTBEAT_OFFSET";

const HEADER_BYTES: u64 = 4096;
/// Room for the pending collectives of groups with thousands of ranks.
const SLOT_BYTES: u64 = 128 << 10;
const ABORTED: u8 = 1;
/// A heartbeat is written within microseconds; a torn one is whole when it is read again.
const MAX_READS: usize = 8;

/// The heartbeats of a node's ranks.
#[derive(Debug)]
pub struct HeartbeatMemory {
    file: File,
    /// The global rank of the first slot.
    first_rank: usize,
}

/// The slot of this process's rank.
#[derive(Debug)]
pub struct HeartbeatSlot {
    file: File,
    offset: u64,
}

impl HeartbeatMemory {
    /// Allocates the memory for `num_ranks` ranks. It is released when this value and all slots are dropped.
    pub fn create(first_rank: usize, num_ranks: usize) -> io::Result<HeartbeatMemory> {
        let file = memfd_create("trainyard-heartbeats", MemfdFlags::CLOEXEC)?;
        let num_bytes = HEADER_BYTES + num_ranks as u64 * SLOT_BYTES;
        fallocate(&file, FallocateFlags::empty(), 0, num_bytes)?;
        let file = File::from(file);
        Ok(HeartbeatMemory { file, first_rank })
    }

    /// Opens the memory of another process, to read it.
    pub fn open(path: &Path, first_rank: usize) -> io::Result<HeartbeatMemory> {
        let file = File::open(path)?;
        Ok(HeartbeatMemory { file, first_rank })
    }

    /// Where other processes of this user can open the memory while this process has it.
    pub fn path(&self) -> PathBuf {
        let fd = self.file.as_raw_fd();
        PathBuf::from(format!("/proc/{}/fd/{fd}", std::process::id()))
    }

    /// The variables by which a rank finds its slot.
    pub fn environment(&self, rank: usize) -> [(OsString, OsString); 2] {
        let offset = self.offset(rank).to_string();
        [
            (HEARTBEATS.into(), self.path().into()),
            (HEARTBEAT_OFFSET.into(), offset.into()),
        ]
    }

    /// The last heartbeat of a rank. `None` if there is none yet, or if what its slot has is not a heartbeat.
    pub fn read(&self, rank: usize) -> Option<Heartbeat> {
        let text = (0..MAX_READS).find_map(|_| self.text(rank))?;
        let heartbeat: Heartbeat = serde_json::from_slice(&text).ok()?;
        // The slot is authoritative: other programs that write heartbeats may number their ranks differently.
        Some(Heartbeat { rank, ..heartbeat })
    }

    /// The JSON of a rank; `None` if it is not whole.
    fn text(&self, rank: usize) -> Option<Vec<u8>> {
        let mut slot = vec![0; SLOT_BYTES as usize];
        let length = self.file.read_at(&mut slot, self.offset(rank)).ok()?;
        let mut lines = slot[..length].split(|byte| *byte == b'\n');
        let text = lines.next().filter(|text| text.first() == Some(&b'{'))?;
        let is_whole = match lines.next().and_then(parse_checksum) {
            Some(checksum) => crc32c::crc32c(text) == checksum,
            None => true,
        };
        is_whole.then(|| text.to_vec())
    }

    /// Marks the world of these ranks as aborted: a rank that gets SIGTERM has nothing to finish, because its peers
    /// are gone.
    pub fn mark_aborted(&self) -> io::Result<()> {
        self.file.write_all_at(&[ABORTED], 0)
    }

    fn offset(&self, rank: usize) -> u64 {
        HEADER_BYTES + rank.saturating_sub(self.first_rank) as u64 * SLOT_BYTES
    }
}

impl HeartbeatSlot {
    /// The slot of this process, if a launcher started it. An error means that the launcher's memory is out of reach,
    /// for example in another container.
    pub fn from_env() -> io::Result<Option<HeartbeatSlot>> {
        let offset = std::env::var(HEARTBEAT_OFFSET).ok();
        let (Some(path), Some(offset)) = (std::env::var_os(HEARTBEATS), offset) else {
            return Ok(None);
        };
        let offset = offset.parse().map_err(io::Error::other)?;
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Some(HeartbeatSlot { file, offset }))
    }

    /// Replaces the rank's heartbeat.
    pub fn write(&self, heartbeat: &mut Heartbeat) -> io::Result<()> {
        heartbeat.written_ns = now_ns();
        self.file.write_all_at(&encode(heartbeat)?, self.offset)
    }

    /// Whether the launcher has aborted the world of this rank.
    pub fn is_aborted(&self) -> bool {
        let mut flag = [0];
        self.file.read_at(&mut flag, 0).is_ok() && flag == [ABORTED]
    }
}

/// The contents of a slot. If the collectives do not fit, the newest pending ones are left out.
fn encode(heartbeat: &mut Heartbeat) -> io::Result<Vec<u8>> {
    loop {
        let mut text = serde_json::to_vec(heartbeat).map_err(io::Error::other)?;
        let checksum = crc32c::crc32c(&text);
        text.extend_from_slice(format!("\n{checksum:08x}\n").as_bytes());
        if text.len() as u64 <= SLOT_BYTES {
            return Ok(text);
        }
        if heartbeat.pending.pop().is_none() {
            heartbeat.completed.clear();
        }
    }
}

fn parse_checksum(line: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(line).ok()?;
    u32::from_str_radix(text, 16)
        .ok()
        .filter(|_| text.len() == 8)
}

#[cfg(test)]
mod tests {
    use trainyard_trace::{CollectiveId, CollectiveKind, Purpose};

    use super::*;
    use crate::{PendingCollective, Stage};

    fn slot(memory: &HeartbeatMemory, rank: usize) -> HeartbeatSlot {
        HeartbeatSlot {
            file: OpenOptions::new()
                .read(true)
                .write(true)
                .open(memory.path())
                .unwrap(),
            offset: memory.offset(rank),
        }
    }

    #[test]
    fn a_heartbeat_is_read_as_written() {
        let memory = HeartbeatMemory::create(2, 2).unwrap();
        let mut heartbeat = Heartbeat {
            rank: 3,
            stage: Stage::Stepping,
            step: 12,
            loss: Some(2.5),
            ..Heartbeat::default()
        };
        assert_eq!(memory.read(3), None);
        slot(&memory, 3).write(&mut heartbeat).unwrap();
        let observer = HeartbeatMemory::open(&memory.path(), 2).unwrap();
        assert_eq!(observer.read(3), Some(heartbeat.clone()));
        assert_eq!(observer.read(2), None);
        // A shorter one does not end in what was there before.
        heartbeat.loss = None;
        slot(&memory, 3).write(&mut heartbeat).unwrap();
        assert_eq!(memory.read(3), Some(heartbeat));
    }

    #[test]
    fn a_torn_heartbeat_is_not_read() {
        let memory = HeartbeatMemory::create(0, 1).unwrap();
        let slot = slot(&memory, 0);
        slot.write(&mut Heartbeat::default()).unwrap();
        let text = encode(&mut Heartbeat::default()).unwrap();
        let at = text.iter().position(|byte| *byte == b'0').unwrap();
        slot.file
            .write_all_at(b"1", slot.offset + at as u64)
            .unwrap();
        assert_eq!(memory.read(0), None);
    }

    #[test]
    fn other_programs_need_no_checksum_and_the_slot_determines_the_rank() {
        let memory = HeartbeatMemory::create(8, 2).unwrap();
        let slot = slot(&memory, 9);
        let text = b"{\"rank\": 1, \"step\": 4}\n";
        slot.file.write_all_at(text, slot.offset).unwrap();
        let heartbeat = memory.read(9).unwrap();
        assert_eq!((heartbeat.rank, heartbeat.step), (9, 4));
    }

    #[test]
    fn ranks_see_that_their_world_is_aborted() {
        let memory = HeartbeatMemory::create(0, 1).unwrap();
        let slot = slot(&memory, 0);
        assert!(!slot.is_aborted());
        memory.mark_aborted().unwrap();
        assert!(slot.is_aborted());
    }

    #[test]
    fn a_long_heartbeat_keeps_its_oldest_collectives() {
        let pending = |sequence| PendingCollective {
            id: CollectiveId {
                kind: CollectiveKind::AllReduce,
                purpose: Purpose::Gradient,
                group: "dp_shard".to_owned(),
                sequence,
            },
            members: (0..10_000).collect(),
            since_ns: 0,
            is_blocking: true,
            shapes: Vec::new(),
        };
        let mut heartbeat = Heartbeat {
            pending: (0..8).map(pending).collect(),
            ..Heartbeat::default()
        };
        let memory = HeartbeatMemory::create(0, 1).unwrap();
        slot(&memory, 0).write(&mut heartbeat).unwrap();
        let read = memory.read(0).unwrap();
        assert_eq!(read.pending[0], pending(0));
        assert!(read.pending.len() < 8);
    }
}
