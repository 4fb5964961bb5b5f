//! The key-value store that the rendezvous needs: the part of etcd's API that a simulation can implement, too.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;

/// The id of a lease.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Lease(pub i64);

/// A key with its value.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// The revision at which the key was created.
    pub create_revision: i64,
    /// The revision of the last write.
    pub mod_revision: i64,
    /// The lease that deletes the key when it expires, if any.
    pub lease: Option<Lease>,
}

/// A change of a key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Change {
    /// The key was written.
    Put(Entry),
    /// The key was deleted, by a client or with its lease.
    Deleted {
        /// The key.
        key: String,
    },
}

/// A precondition of a transaction.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Compare {
    /// The key was last written at this revision; 0 if it does not exist.
    ModRevision(String, i64),
    /// The key was created at this revision.
    CreateRevision(String, i64),
}

/// A write of a transaction.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Put {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// The lease that deletes the key when it expires, if any.
    pub lease: Option<Lease>,
}

/// One key, or all keys with a prefix.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Range {
    /// One key.
    Key(String),
    /// All keys with this prefix.
    Prefix(String),
}

impl Range {
    /// Whether a key is in the range.
    pub fn contains(&self, key: &str) -> bool {
        match self {
            Range::Key(one) => one == key,
            Range::Prefix(prefix) => key.starts_with(prefix),
        }
    }
}

/// The store did not respond, or reported an error. The request may still have taken effect.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct KvError(pub String);

/// A store with revisions, leases, transactions and watches, all linearizable. Every call returns within seconds.
#[async_trait]
pub trait Kv: Send + Sync {
    /// The address of the store, for error messages.
    fn describe(&self) -> String;

    /// Grants a lease of this length.
    async fn grant(&self, length: Duration) -> Result<Lease, KvError>;

    /// Renews a lease; `false` if it has expired.
    async fn keep_alive(&self, lease: Lease) -> Result<bool, KvError>;

    /// Ends a lease and deletes its keys.
    async fn revoke(&self, lease: Lease) -> Result<(), KvError>;

    /// The entries in a range, and the revision at which they were read.
    async fn get(&self, range: Range) -> Result<(Vec<Entry>, i64), KvError>;

    /// Writes everything if all preconditions hold, and returns the revision of the write; `None` if one does not
    /// hold.
    async fn put_if(&self, compare: Vec<Compare>, puts: Vec<Put>) -> Result<Option<i64>, KvError>;

    /// Every change from a revision on, in order and without gaps. Changes of one revision arrive together. The
    /// stream ends when the store can no longer guarantee this.
    async fn watch(
        &self,
        ranges: Vec<Range>,
        from: i64,
    ) -> Result<BoxStream<'static, Result<Vec<Change>, KvError>>, KvError>;
}
