//! Checkpoints in the memory of peers, so that a lost host or a restarted worker is restored without
//! reading storage.
//!
//! Every host has a [`Holder`]: a process, or a thread of the launcher, that outlives the workers and
//! keeps files in memory. A worker saves through a [`PeerStore`], which is a [`Store`] like any other:
//! what it writes goes to the holder of its own host and to that of the next one, and what it reads
//! comes from whichever has it. One host can go and nothing is lost; two neighbours cannot.
//!
//! Holders listen on one named address and speak to nobody who does not know the run's [`Secret`].
//! The secret proves both sides and signs every message; it never travels. Messages are not
//! encrypted.
//!
//! A crate of its own, because the launcher needs the holder and no trainer, and the trainer needs the
//! store and no launcher.
//!
//! [`Store`]: trainyard_checkpoint::Store

mod environment;
mod guests;
mod holder;
mod link;
mod neighbourhood;
mod newest;
mod peer;
mod peer_store;
mod secret;
mod shelf;
mod wire;

pub use environment::{
    EnvironmentError, HOLDER, HOLDER_INDEX, HOLDERS, OwnHolder, SECRET_FILE, from_environment,
};
pub use holder::{Holder, HolderError};
pub use neighbourhood::{Neighbourhood, NeighbourhoodError, partner};
pub use newest::{Choice, Place, newest};
pub use peer_store::PeerStore;
pub use secret::{Secret, SecretError, SharedSecret};
