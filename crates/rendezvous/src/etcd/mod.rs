//! A rendezvous in etcd, for runs that must outlive any one machine.
//!
//! Every agent has a key of its own, held by a lease, with what it joined with and what it last said. One agent, the
//! *steward*, holds one more key and decides for all: it watches the agents' keys, and writes the record, which all
//! others watch. When the steward is lost its key goes with its lease, and another takes over from what is stored.
//! Nobody ever rewrites what another may be writing: every write names the revision it follows.
//!
//! ```text
//! trainyard/RUN/agents/NODE     what an agent says; gone when its lease is
//! trainyard/RUN/steward         who decides; gone when its lease is
//! trainyard/RUN/record          the record
//! trainyard/RUN/refusals/NODE   why an agent was not let in; gone when that agent is
//! ```
//!
//! Every value carries a keyed digest under the run's [`Secret`](crate::Secret), so whoever can write to etcd but does
//! not know the secret can disturb a run but not join or steer it. etcd's own users and TLS keep others out of etcd.

mod api;
mod attendant;
mod kv;
mod network;
mod seal;
mod steward;

pub use attendant::Etcd;
pub use kv::{Change, Compare, Entry, Kv, KvError, Lease, Put, Range};
pub use network::{Cluster, ClusterTls};
