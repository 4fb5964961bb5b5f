//! The secret of a run, and mutually authenticated TLS 1.3 with keys derived from it.
//!
//! All processes of a run share one [`RunSecret`]. From it each service of the run derives an [`Identity`]: a key
//! pair for its server and one for its clients. Both ends insist on the other's key, so a process without the secret
//! fails the TLS handshake, and there are no certificates to issue, distribute or renew.
//!
//! This is a crate of its own because its users share nothing else: the rendezvous speaks gRPC over asynchronous
//! sockets, the workers' store speaks `TCPStore`'s protocol, peer checkpoints and parameter servers speak protocols of
//! messages over blocking sockets ([`MessageServer`]).

#[cfg(feature = "tokio")]
mod acceptor;
mod connection_limiter;
mod identity;
mod message_server;
mod secret;
mod stream;

#[cfg(feature = "tokio")]
pub use acceptor::{Acceptor, Limits, NumConnections};
pub use identity::{Identity, PinnedKeyVerifier, Service, TlsError};
pub use message_server::MessageServer;
pub use secret::{RunSecret, SecretError, SecretFile};
pub use stream::{AuthenticatedStream, ClientStream, MessageProtocol, ServerStream};
