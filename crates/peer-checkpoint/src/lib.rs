//! In-memory peer checkpoints: a job recovers from a lost node or a restarted worker without reading storage.
//!
//! Every node has a [`ReplicaServer`]: a process, or a thread of the launcher, that outlives the workers and keeps
//! files in memory. A worker saves through a [`PeerStore`], which is a [`Store`] like any other: it writes each file
//! to the replica server of its own node and to that of the next one, and reads from whichever server has the file.
//! A job survives the loss of any one node, but not of two adjacent ones.
//!
//! A replica server listens on one address and serves only processes of the run: connections are TLS 1.3 with keys
//! derived from the [`RunSecret`], the same secret that the rendezvous uses.
//!
//! This is a crate of its own because the launcher needs the server and no trainer, and the trainer needs the store
//! and no launcher.
//!
//! [`Store`]: trainyard_checkpoint::Store
//! [`RunSecret`]: trainyard_tls::RunSecret

mod environment;
mod memory_store;
mod peer;
mod peer_store;
mod placement;
mod resume_point;
mod server;
mod wire;

pub use environment::{
    EnvironmentError, LocalReplicaServer, REPLICA_SERVER, REPLICA_SERVER_INDEX, REPLICA_SERVERS,
    SECRET_FILE, from_environment,
};
pub use peer_store::PeerStore;
pub use placement::{PlacementError, ReplicaPlacement, buddy};
pub use resume_point::{ResumePoint, Tier, select_resume_point};
#[doc(hidden)]
pub use server::replies;
pub use server::{ReplicaServer, ReplicaServerError};
