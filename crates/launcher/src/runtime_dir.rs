//! The runtime directory of a job on this node: a small directory in memory with `job.json`, by which other processes
//! of the same user find the job and its heartbeats. The job itself does not need it.
//!
//! The launcher holds a lock on `job.json`. A directory without that lock is left over from a launcher that was
//! killed, and the next launcher removes it. A pid would not identify the launcher: containers may share the
//! directory, and each has its own pids.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use trainyard_heartbeat::HeartbeatMemory;

use crate::Job;

const JOB_FILE: &str = "job.json";

/// How long a launcher may take from creating its directory to writing `job.json`.
const CREATION_TIMEOUT: Duration = Duration::from_secs(60);

/// The description of a running job that its launcher publishes in `job.json`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct JobInfo {
    /// The name of the job.
    pub run_id: String,
    /// The launcher's process.
    pub pid: u32,
    /// The rank of this node.
    pub node_rank: usize,
    /// The number of nodes.
    pub num_nodes: usize,
    /// The first global rank on this node.
    pub first_rank: usize,
    /// The number of ranks on this node.
    pub num_ranks: usize,
    /// The number of ranks on all nodes.
    pub world_size: usize,
    /// How many times the job was restarted.
    pub restarts: usize,
    /// How many restarts are allowed.
    pub max_restarts: usize,
    /// Where processes of this node reach the workers' store, through which agents share heartbeats; `None` without
    /// agents.
    pub store: Option<(String, u16)>,
    /// The address of that store among the agents, the same on all nodes.
    pub world_store: Option<String>,
    /// Reports of earlier failures of the job, oldest first.
    pub faults: Vec<String>,
    /// The memory with the heartbeats of this node's ranks.
    pub heartbeats: Option<PathBuf>,
}

impl JobInfo {
    fn new(job: &Job, heartbeats: Option<&HeartbeatMemory>) -> JobInfo {
        JobInfo {
            run_id: job.run_id.clone(),
            pid: std::process::id(),
            node_rank: job.node_rank,
            num_nodes: job.num_nodes,
            first_rank: job.rank_of(0),
            num_ranks: job.nproc,
            world_size: job.world_size(),
            restarts: job.restart_count,
            max_restarts: job.max_restarts,
            store: job
                .world_store
                .as_ref()
                .and(job.master_port)
                .map(|port| (job.master_addr.clone(), port)),
            world_store: job.world_store.clone(),
            faults: job.faults.clone(),
            heartbeats: heartbeats.map(HeartbeatMemory::path),
        }
    }
}

/// A job's runtime directory. Dropping the value removes it.
#[derive(Debug)]
pub(crate) struct RuntimeDir {
    _dir: TempDir,
    /// Holds the lock.
    _job_file: File,
}

impl RuntimeDir {
    pub(crate) fn create(
        job: &Job,
        heartbeats: Option<&HeartbeatMemory>,
    ) -> io::Result<RuntimeDir> {
        RuntimeDir::create_in(&root(), job, heartbeats)
    }

    fn create_in(
        root: &Path,
        job: &Job,
        heartbeats: Option<&HeartbeatMemory>,
    ) -> io::Result<RuntimeDir> {
        ensure_private(root)?;
        for dir in subdirs(root) {
            if is_stale(&dir) {
                let _ = fs::remove_dir_all(dir);
            }
        }
        let dir = tempfile::Builder::new()
            .prefix(&format!("{}-", std::process::id()))
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(root)?;
        // The file is locked before it appears under its name.
        let next = dir.path().join(".job.json");
        let mut job_file = File::create(&next)?;
        flock(&job_file, FlockOperation::NonBlockingLockShared)?;
        let info = JobInfo::new(job, heartbeats);
        serde_json::to_writer(&mut job_file, &info).map_err(io::Error::other)?;
        fs::rename(next, dir.path().join(JOB_FILE))?;
        Ok(RuntimeDir {
            _dir: dir,
            _job_file: job_file,
        })
    }
}

/// The jobs that launchers of this user run on this node.
pub fn running_jobs() -> Vec<JobInfo> {
    running_jobs_in(&root())
}

fn running_jobs_in(root: &Path) -> Vec<JobInfo> {
    let read = |dir: &Path| serde_json::from_slice(&fs::read(dir.join(JOB_FILE)).ok()?).ok();
    let mut jobs: Vec<JobInfo> = subdirs(root)
        .into_iter()
        .filter(|dir| !is_stale(dir))
        .filter_map(|dir| read(&dir))
        .collect();
    jobs.sort_by_key(|info| (info.run_id.clone(), info.node_rank, info.pid));
    jobs
}

/// The parent of all runtime directories of this user, in memory if possible.
fn root() -> PathBuf {
    let shm = Path::new("/dev/shm");
    let parent = if shm.is_dir() {
        shm.to_owned()
    } else {
        std::env::temp_dir()
    };
    parent.join(format!("trainyard-{}", geteuid().as_raw()))
}

/// Creates a directory if needed, and checks that only this user has access to it.
fn ensure_private(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let metadata = fs::symlink_metadata(dir)?;
    let is_private =
        metadata.is_dir() && metadata.uid() == geteuid().as_raw() && metadata.mode() & 0o077 == 0;
    if is_private {
        Ok(())
    } else {
        Err(io::Error::other(format!(
            "{} is not a private directory of this user",
            dir.display()
        )))
    }
}

fn subdirs(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Whether the launcher of a runtime directory is dead. A new directory without `job.json` is still being created.
///
/// The check holds an exclusive lock for a moment. Another process that checks the same directory in that moment takes
/// its launcher for alive, so a stale directory may stay until the next launcher starts.
fn is_stale(dir: &Path) -> bool {
    match File::open(dir.join(JOB_FILE)) {
        // The launcher's shared lock excludes this one.
        Ok(job_file) => flock(&job_file, FlockOperation::NonBlockingLockExclusive).is_ok(),
        Err(_) => fs::metadata(dir)
            .and_then(|metadata| metadata.modified())
            .is_ok_and(|at| at.elapsed().is_ok_and(|age| age > CREATION_TIMEOUT)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A root for one test. In the user's root, other tests and jobs come and go at any time.
    fn private_root() -> TempDir {
        tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .unwrap()
    }

    #[test]
    fn a_job_is_listed_while_its_runtime_dir_exists() {
        let root = private_root();
        let job = Job::new("p", 2);
        let runtime_dir = RuntimeDir::create_in(root.path(), &job, None).unwrap();
        let jobs = running_jobs_in(root.path());
        let [info] = jobs.as_slice() else {
            panic!("one job runs, not {jobs:?}")
        };
        assert_eq!((info.num_ranks, info.world_size), (2, 2));
        let path = runtime_dir._dir.path().to_owned();
        drop(runtime_dir);
        assert!(running_jobs_in(root.path()).is_empty() && !path.exists());
    }

    #[test]
    fn stale_runtime_dirs_are_removed() {
        let root = private_root();
        let create = || RuntimeDir::create_in(root.path(), &Job::new("p", 1), None).unwrap();
        let (stale, new) = (root.path().join("stale"), root.path().join("new"));
        fs::create_dir(&stale).unwrap();
        fs::create_dir(&new).unwrap();
        fs::write(stale.join(JOB_FILE), "{}").unwrap();
        let runtime_dir = create();
        assert!(!stale.exists() && new.exists());
        let _other = create();
        assert!(runtime_dir._dir.path().exists(), "its launcher is alive");
    }
}
