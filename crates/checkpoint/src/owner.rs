//! The owner of a checkpoint folder: one running job at a time.
//!
//! The owner holds a lock, and a second job is rejected. On a file system the kernel releases the lock when its holder
//! ends; in an object store it is a lease that the holder renews. The owner also writes [`OWNER`] with a token of its
//! own, and before it commits or deletes a checkpoint it reads the file again: a job that is no longer the owner,
//! because a newer epoch of the run or another job took over, changes nothing any more.

use std::io;

use serde::{Deserialize, Serialize};

use crate::{CheckpointError, Result, Store};

/// The file in a checkpoint folder that names its owner.
pub const OWNER: &str = "owner.json";
/// The file that the owner locks.
const LOCK: &str = "owner.lock";

/// A job that owns a checkpoint folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The id of the run.
    pub run: String,
    /// How often the world of the run has been formed; a newer one takes over from an older one.
    pub epoch: u64,
    /// The host of the owner.
    pub host: String,
    /// The process of the owner.
    pub pid: u32,
    /// Differs for every claim.
    token: String,
}

impl Owner {
    /// This process as the owner of a folder, for an epoch of a run.
    pub fn this_process(run: &str, epoch: u64) -> Result<Owner> {
        Ok(Owner {
            run: run.to_owned(),
            epoch,
            host: host(),
            pid: std::process::id(),
            token: unique_token()?,
        })
    }

    /// Whether this is a newer epoch of the run that `other` is an epoch of.
    fn supersedes(&self, other: &Owner) -> bool {
        self.run == other.run && self.epoch > other.epoch
    }
}

fn host() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname");
    host.map_or("unknown".into(), |host| host.trim().to_owned())
}

/// A text that no other call on any host returns.
pub(crate) fn unique_token() -> Result<String> {
    let token = getrandom::u64()
        .map_err(|error| CheckpointError::io("a random number")(io::Error::other(error)))?;
    Ok(format!("{token:016x}"))
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Owner { run, host, pid, .. } = self;
        write!(f, "run `{run}`, process {pid} on host {host}")
    }
}

/// What a store can say about a lock.
pub enum Lock {
    /// Held until this value is dropped, at the latest until the process ends.
    Acquired(Box<dyn Send + Sync>),
    /// Another process holds it.
    Held,
    /// The store has no locks.
    Unsupported,
}

/// The claim of this process to a checkpoint folder.
pub struct Ownership {
    owner: Owner,
    /// Keeps the lock.
    _lock: Option<Box<dyn Send + Sync>>,
}

impl std::fmt::Debug for Ownership {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ownership({})", self.owner)
    }
}

impl Ownership {
    /// Makes `owner` the owner of a folder, unless another job that runs owns it.
    pub fn claim(store: &dyn Store, owner: Owner) -> Result<Ownership> {
        let before = current(store)?;
        let is_superseded = before
            .as_ref()
            .is_some_and(|before| owner.supersedes(before));
        let lock = match store.lock(LOCK, is_superseded)? {
            Lock::Acquired(lock) => Some(lock),
            Lock::Unsupported => None,
            // The rest of an older epoch, on a host that cannot be reached.
            Lock::Held if is_superseded => None,
            Lock::Held => {
                return Err(CheckpointError::Owned {
                    path: store.describe(""),
                    owner: before.map_or("another job".into(), |owner| owner.to_string()),
                });
            }
        };
        let text = serde_json::to_vec_pretty(&owner);
        let text =
            text.map_err(|error| CheckpointError::io(store.describe(OWNER))(error.into()))?;
        store.put(OWNER, &text)?;
        Ok(Ownership { owner, _lock: lock })
    }

    /// Fails if another job has become the owner since.
    pub fn check(&self, store: &dyn Store) -> Result<()> {
        match current(store)? {
            Some(owner) if owner.token == self.owner.token => Ok(()),
            other => Err(CheckpointError::Fenced {
                path: store.describe(""),
                owner: other.map_or("no job".into(), |owner| owner.to_string()),
            }),
        }
    }
}

/// The owner that the folder names.
fn current(store: &dyn Store) -> Result<Option<Owner>> {
    let Some(size) = store.size(OWNER)? else {
        return Ok(None);
    };
    let text = store.read(OWNER, 0..size)?;
    let owner = serde_json::from_slice(&text);
    owner
        .map(Some)
        .map_err(|error| CheckpointError::format(&store.describe(OWNER), error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store;

    fn owner(run: &str, epoch: u64) -> Owner {
        Owner::this_process(run, epoch).unwrap()
    }

    #[test]
    fn a_second_job_is_rejected_until_the_first_ends() {
        let dir = tempfile::tempdir().unwrap();
        let store = store::open(dir.path()).unwrap();
        let first = Ownership::claim(&*store, owner("a", 0)).unwrap();
        let rejected = Ownership::claim(&*store, owner("b", 0)).unwrap_err();
        assert!(rejected.to_string().contains("run `a`"), "{rejected}");
        assert!(Ownership::claim(&*store, owner("a", 0)).is_err());
        first.check(&*store).unwrap();
        drop(first);
        let second = Ownership::claim(&*store, owner("b", 0)).unwrap();
        second.check(&*store).unwrap();
    }

    #[test]
    fn a_newer_epoch_fences_the_older_one() {
        let dir = tempfile::tempdir().unwrap();
        let store = store::open(dir.path()).unwrap();
        let old = Ownership::claim(&*store, owner("a", 1)).unwrap();
        let new = Ownership::claim(&*store, owner("a", 2)).unwrap();
        new.check(&*store).unwrap();
        let fenced = old.check(&*store).unwrap_err();
        assert!(matches!(fenced, CheckpointError::Fenced { .. }), "{fenced}");
        assert!(Ownership::claim(&*store, owner("a", 1)).is_err());
    }
}
