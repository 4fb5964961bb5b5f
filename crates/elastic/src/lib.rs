//! The elastic agent: one per node of an elastic run, as in torchelastic.
//!
//! An agent joins a run through a [rendezvous](trainyard_rendezvous), starts the workers of its node with the ranks
//! it is assigned, supervises them, and stops them when their world is broken. It also serves the workers' TCPStore
//! ([`WorkerStore`]) if the rendezvous chose its node for that, so that the exit of a worker never takes the store
//! away.
//!
//! A pure state machine ([`State::on_event`]) decides what the agent does next; the loop that acts ([`run_agent`])
//! decides nothing. The same loop renews the agent's lease, so an agent that hangs loses its membership.

mod agent;
mod error;
mod heartbeat_exchange;
mod rendezvous_config;
mod rendezvous_handle;
mod state;
mod store;

pub use agent::{AgentConfig, AgentOutcome, run_agent};
pub use error::AgentError;
pub use heartbeat_exchange::peer_heartbeats;
pub use rendezvous_config::RendezvousConfig;
pub use state::{Action, AgentExit, Event, GracePeriods, State};
pub use store::WorkerStore;
#[doc(hidden)]
pub use store::serve_alone;
