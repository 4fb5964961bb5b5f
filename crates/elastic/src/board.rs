//! The board of a job on this machine: a small folder in memory, where ranks leave their pulses and where
//! anybody of the same user can read how the job is.
//!
//! A launcher holds a lock in its folder, so one whose launcher was killed is known for what it is, and the
//! next launcher clears it away. Processes' numbers would not do: containers may share this place, and have
//! numbers of their own.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use trainyard_trace::call_over;

use crate::Job;

const NOTICE: &str = "job.json";

/// Between a folder and the notice in it.
const HUNG_UP_WITHIN: Duration = Duration::from_secs(60);

/// What a launcher says about its job.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Notice {
    /// The job's name.
    pub run_id: String,
    /// The launcher's process.
    pub pid: u32,
    /// Which machine this is.
    pub node_rank: usize,
    /// Of how many.
    pub num_nodes: usize,
    /// The first rank on this machine.
    pub first_rank: usize,
    /// How many are on this machine.
    pub num_ranks: usize,
    /// How many there are on all machines.
    pub world_size: usize,
    /// How often the job was started again.
    pub restarts: usize,
    /// How often it may be.
    pub max_restarts: usize,
    /// Where agents tell each other of their ranks: host and port of the job's store, if agents serve it.
    pub store: Option<(String, u16)>,
    /// What happened before this start, the last of it last.
    pub faults: Vec<String>,
}

impl Notice {
    fn of(job: &Job) -> Notice {
        Notice {
            run_id: job.run_id.clone(),
            pid: std::process::id(),
            node_rank: job.node_rank,
            num_nodes: job.num_nodes,
            first_rank: job.rank_of(0),
            num_ranks: job.nproc,
            world_size: job.world_size(),
            restarts: job.restart_count,
            max_restarts: job.max_restarts,
            // Only agents say which ranks are here.
            store: job
                .ranks
                .and(job.master_port)
                .map(|port| (job.master_addr.clone(), port)),
            faults: job.faults.clone(),
        }
    }
}

/// A job's folder, which goes with this value.
#[derive(Debug)]
pub(crate) struct Board {
    folder: TempDir,
    /// Locked as long as this is there.
    _notice: File,
}

impl Board {
    pub(crate) fn hang_up(job: &Job) -> io::Result<Board> {
        let wall = wall();
        own(&wall)?;
        for folder in folders(&wall) {
            if is_left_behind(&folder) {
                let _ = fs::remove_dir_all(folder);
            }
        }
        let folder = tempfile::Builder::new()
            .prefix(&format!("{}-", std::process::id()))
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(wall)?;
        // Nobody sees a notice without its lock.
        let next = folder.path().join(".notice");
        let mut notice = File::create(&next)?;
        flock(&notice, FlockOperation::NonBlockingLockShared)?;
        serde_json::to_writer(&mut notice, &Notice::of(job)).map_err(io::Error::other)?;
        fs::rename(next, folder.path().join(NOTICE))?;
        Ok(Board {
            folder,
            _notice: notice,
        })
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Lets ranks know that their world is broken: who is told to end has nothing to finish.
    pub(crate) fn call_it_over(&self) {
        let _ = call_over(self.folder());
    }
}

/// What this user's launchers on this machine say, and where their ranks' pulses are.
pub fn notices() -> Vec<(PathBuf, Notice)> {
    let read = |folder: &Path| serde_json::from_slice(&fs::read(folder.join(NOTICE)).ok()?).ok();
    let mut found: Vec<(PathBuf, Notice)> = folders(&wall())
        .into_iter()
        .filter(|folder| !is_left_behind(folder))
        .filter_map(|folder| Some((folder.clone(), read(&folder)?)))
        .collect();
    found.sort_by_key(|(_, notice)| (notice.run_id.clone(), notice.node_rank, notice.pid));
    found
}

/// Where all boards of this user are: in memory if that can be, because a disk that is busy with a
/// checkpoint would make every rank look stopped.
fn wall() -> PathBuf {
    let memory = Path::new("/dev/shm");
    let place = match memory.is_dir() {
        true => memory.to_owned(),
        false => std::env::temp_dir(),
    };
    place.join(format!("trainyard-{}", geteuid().as_raw()))
}

/// Makes sure that a folder is there and this user's alone.
fn own(wall: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(wall)?;
    let found = fs::symlink_metadata(wall)?;
    let is_own = found.is_dir() && found.uid() == geteuid().as_raw() && found.mode() & 0o077 == 0;
    match is_own {
        true => Ok(()),
        false => Err(io::Error::other("it is not this user's alone")),
    }
}

fn folders(wall: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(wall).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Whether its launcher is no more. One that is only being hung up has no notice, and time.
fn is_left_behind(folder: &Path) -> bool {
    match File::open(folder.join(NOTICE)) {
        // Nobody else has it, not even to read.
        Ok(notice) => flock(&notice, FlockOperation::NonBlockingLockExclusive).is_ok(),
        Err(_) => fs::metadata(folder)
            .and_then(|found| found.modified())
            .is_ok_and(|at| at.elapsed().is_ok_and(|age| age > HUNG_UP_WITHIN)),
    }
}

#[cfg(test)]
mod tests {
    use trainyard_trace::is_over;

    use super::*;

    #[test]
    fn a_board_is_found_while_it_hangs() {
        let mut job = Job::new("p", 2);
        job.run_id = format!("board-{}", std::process::id());
        let found = || notices().into_iter().find(|(_, n)| n.run_id == job.run_id);
        let board = Board::hang_up(&job).unwrap();
        let (folder, notice) = found().unwrap();
        assert_eq!(folder, board.folder());
        assert_eq!((notice.num_ranks, notice.world_size), (2, 2));
        assert!(!is_over(&folder));
        board.call_it_over();
        assert!(is_over(&folder));
        drop(board);
        assert!(found().is_none() && !folder.exists());
    }

    #[test]
    fn what_a_killed_launcher_left_is_cleared_away() {
        own(&wall()).unwrap();
        let left = wall().join(format!("left-{}", std::process::id()));
        fs::create_dir_all(&left).unwrap();
        let begun = wall().join(format!("begun-{}", std::process::id()));
        fs::create_dir_all(&begun).unwrap();
        fs::write(left.join(NOTICE), "{}").unwrap();
        let board = Board::hang_up(&Job::new("p", 1)).unwrap();
        assert!(!left.exists() && begun.exists());
        let _other = Board::hang_up(&Job::new("p", 1)).unwrap();
        assert!(board.folder().exists(), "its launcher lives");
        fs::remove_dir(begun).unwrap();
    }
}
