//! Rendezvous: agrees on which nodes take part in a run, and on the rank of each.
//!
//! Every node runs one agent. Agents [`join`](Backend::join) a run, and as soon as enough of them have joined, a
//! *world* is formed: an ordered list of nodes under an [`Epoch`], a number that is used only once. An agent keeps
//! its membership by renewing a lease. When a node is lost, leaves or fails, the world is invalidated, all agents
//! stop their workers, and a new world is formed of the survivors and of the nodes on standby; survivors keep their
//! ranks.
//!
//! One pure function, [`step`], makes every decision: it takes the state, an event and the time, and returns the new
//! state, the actions to take and the reason. Time is monotonic, and clocks of different nodes are never compared.
//! The state that must survive a crash of the decider is one [`RunState`]. It is durable before any agent learns of
//! it.
//!
//! Two backends implement the trait [`Backend`]: a gRPC [`server`], and [`etcd`] for runs that must survive the loss
//! of any one node.

mod backend;
mod client_session;
mod coordinator;
pub mod etcd;
mod event;
mod format;
mod jitter;
mod join;
mod lease_tracker;
mod membership;
mod node_info;
mod policy;
mod protocol;
mod reason;
mod rejection;
mod run_state;
pub mod server;
mod session;
mod step;
mod world;

pub use backend::{Backend, Membership, RendezvousError};
pub use client_session::ClientSession;
pub use coordinator::{Coordinator, Reply};
pub use event::{Event, Report};
pub use format::FORMAT_VERSION;
pub use join::{Join, Watermark};
pub use lease_tracker::LeaseTracker;
pub use node_info::{Address, Epoch, NodeInfo};
pub use policy::Policy;
pub use protocol::{Request, RequestKind, Response};
pub use reason::Reason;
pub use rejection::Rejection;
pub use run_state::{Cause, Decision, Phase, RankAssignment, RunOutcome, RunState};
pub use step::{Action, LeaseClock, State, Step, step};
pub use trainyard_tls::RunSecret;
