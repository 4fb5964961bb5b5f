//! The rendezvous server: one process, on any host, that serves one run.
//!
//! Every agent keeps one connection, and on it one gRPC stream: requests one way, responses the other. Agents do not
//! poll. The server decides requests that arrive together in one batch, and writes the run state to disk before any
//! agent learns of it. A restarted server resumes from that file, and workers keep running meanwhile.
//!
//! Connections are mutually authenticated TLS 1.3 with keys derived from the [`RunSecret`](crate::RunSecret), without
//! certificates. From a client that does not know the secret the server parses nothing but the TLS handshake.

mod client;
mod codec;
mod coordinator_task;
mod listener;
mod record_file;

pub use client::Client;
pub use codec::{PROTOCOL_VERSION, SESSION_METHOD};
pub use listener::{Server, serve, serve_forever};
pub use trainyard_tls::Limits;
