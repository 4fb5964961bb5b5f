//! The rendezvous in etcd, for runs that must survive the loss of any one node.
//!
//! Every agent writes one key, attached to its lease, with its join and its last report. One agent, the *leader*,
//! holds one more key and decides for all: it watches the agents' keys and writes the run's record, which all agents
//! watch. When the leader is lost its key disappears with its lease, and another agent takes over from the stored
//! record. No write overwrites a concurrent one: every write names the revision that it replaces.
//!
//! ```text
//! trainyard/RUN/agents/NODE       an agent's join and last report; attached to its lease
//! trainyard/RUN/leader            held by the leader; attached to its lease
//! trainyard/RUN/record            the run state
//! trainyard/RUN/rejections/NODE   why the leader rejected an agent; attached to the agent's lease
//! ```
//!
//! Every value carries a MAC under a key derived from the [`RunSecret`](crate::RunSecret). A client that can write to
//! etcd but does not know the secret can disturb a run, but it cannot join or control it. etcd's own users and TLS
//! keep such clients out.

mod api;
mod authenticator;
mod cluster;
mod kv;
mod leader;
mod session;
mod store;

pub use cluster::{Cluster, ClusterTls, ClusterUser};
pub use kv::{Change, Compare, Entry, Kv, KvError, Lease, Put, Range};
pub use session::Etcd;
