//! The board of a job on this machine: a small folder in memory, where ranks leave their pulses and where
//! anybody of the same user can read how the job is.
//!
//! Folders are named for the launcher's process, so one whose launcher was killed is known for what it is,
//! and the next launcher clears it away.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Pid, geteuid, test_kill_process};
use serde::{Deserialize, Serialize};
use trainyard_trace::call_over;

use crate::Job;

const NOTICE: &str = "job.json";

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
pub(crate) struct Board(PathBuf);

impl Board {
    pub(crate) fn hang_up(job: &Job) -> io::Result<Board> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let wall = wall();
        own(&wall)?;
        for (folder, pid) in folders(&wall) {
            if !is_running(pid) {
                let _ = fs::remove_dir_all(folder);
            }
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = wall.join(format!("{}-{number}", std::process::id()));
        // Of an earlier process with this number.
        let _ = fs::remove_dir_all(&folder);
        DirBuilder::new().mode(0o700).create(&folder)?;
        let board = Board(folder);
        let text = serde_json::to_vec(&Notice::of(job)).map_err(io::Error::other)?;
        fs::write(board.0.join(NOTICE), text)?;
        Ok(board)
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.0
    }

    /// Lets ranks know that their world is broken: who is told to end has nothing to finish.
    pub(crate) fn call_it_over(&self) {
        let _ = call_over(&self.0);
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What this user's launchers on this machine say, and where their ranks' pulses are.
pub fn notices() -> Vec<(PathBuf, Notice)> {
    let running = folders(&wall()).into_iter();
    let running = running.filter(|(_, pid)| is_running(*pid));
    let read = |folder: &Path| serde_json::from_slice(&fs::read(folder.join(NOTICE)).ok()?).ok();
    let mut found: Vec<(PathBuf, Notice)> = running
        .filter_map(|(folder, _)| Some((folder.clone(), read(&folder)?)))
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

/// Folders on the wall, with the process each is named for.
fn folders(wall: &Path) -> Vec<(PathBuf, i32)> {
    let entries = fs::read_dir(wall).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let pid = name.split_once('-')?.0.parse().ok()?;
            Some((entry.path(), pid))
        })
        .collect()
}

fn is_running(pid: i32) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid).is_ok())
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
        // No process has so large a number.
        let left = wall().join("2147483646-0");
        fs::create_dir_all(&left).unwrap();
        let _board = Board::hang_up(&Job::new("p", 1)).unwrap();
        assert!(!left.exists());
    }
}
