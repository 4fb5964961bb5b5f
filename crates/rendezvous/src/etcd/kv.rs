//! What is asked of a store: little enough that it can be simulated.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;

/// A lease's number.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Lease(pub i64);

/// A key with its value.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// When the key came to be.
    pub created: i64,
    /// When it was last written.
    pub modified: i64,
    /// What it goes with, if anything.
    pub lease: Option<Lease>,
}

/// What happened to a key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Change {
    /// It was written.
    Put(Entry),
    /// It was deleted, by somebody or with its lease.
    Gone {
        /// The key.
        key: String,
    },
}

/// What must hold for a transaction.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Compare {
    /// The key was last written at this revision; 0 for a key that is not there.
    Modified(String, i64),
    /// The key came to be at this revision.
    Created(String, i64),
}

/// What a transaction writes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Put {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// What it goes with, if anything.
    pub lease: Option<Lease>,
}

/// One key, or all that begin alike.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Range {
    /// One key.
    Key(String),
    /// All keys that begin like this.
    Prefix(String),
}

impl Range {
    /// Whether a key is in it.
    pub fn contains(&self, key: &str) -> bool {
        match self {
            Range::Key(one) => one == key,
            Range::Prefix(prefix) => key.starts_with(prefix),
        }
    }
}

/// Why the store did not answer. Whether it did what was asked is not known then.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct KvError(pub String);

/// A store with revisions, leases, transactions and watches, all linearizable. Every call returns within seconds.
#[async_trait]
pub trait Kv: Send + Sync {
    /// Where it is, for people.
    fn describe(&self) -> String;

    /// A new lease of this length.
    async fn grant(&self, length: Duration) -> Result<Lease, KvError>;

    /// Renews a lease; `false` if it is over.
    async fn keep_alive(&self, lease: Lease) -> Result<bool, KvError>;

    /// Ends a lease, and with it its keys.
    async fn revoke(&self, lease: Lease) -> Result<(), KvError>;

    /// What is there, and at which revision.
    async fn get(&self, range: Range) -> Result<(Vec<Entry>, i64), KvError>;

    /// Writes all of it if all of it holds, and says at which revision; `None` if something does not hold.
    async fn put_if(&self, compare: Vec<Compare>, puts: Vec<Put>) -> Result<Option<i64>, KvError>;

    /// Every change from this revision on, in order and without gaps; ends when that cannot be kept up. Changes of
    /// one moment come together.
    async fn watch(
        &self,
        ranges: Vec<Range>,
        from: i64,
    ) -> Result<BoxStream<'static, Result<Vec<Change>, KvError>>, KvError>;
}
