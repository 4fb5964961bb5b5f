//! A rendezvous of its own: one server, on any machine, for one run.
//!
//! Every agent holds one connection, and on it one gRPC stream: letters one way, answers the other. Nobody polls.
//! Letters that come together are decided together, and the record is on disk before anybody hears of it, so a
//! server that is restarted goes on where it was; agents that were running go on running meanwhile.
//!
//! Connections are TLS 1.3 both ways, with keys that follow from the run's [`Secret`](crate::Secret) and no
//! certificates. Nothing of a stranger's is parsed beyond the TLS handshake.

mod client;
mod disk;
mod door;
mod identity;
mod office;
mod wire;

pub use client::Client;
pub use door::{Limits, Server, serve, serve_forever};
