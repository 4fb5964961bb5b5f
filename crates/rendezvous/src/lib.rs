//! Which machines make up a run, and which rank each has.
//!
//! Every machine has one agent. Agents [`join`](Backend::join) a run, and as soon as enough are there a
//! *world* is formed: an ordered list of them under an [`Epoch`], a number that is used once. An agent
//! holds its place by a lease. When one is lost, leaves or fails, the world is broken, everybody stops,
//! and a new one is formed of those that are left and those that waited; survivors keep their ranks.
//!
//! The decision is one pure function, [`step`]: it takes the state, an event and the time, and returns
//! the new state, what is to be done, and why. Time is monotonic; clocks of different machines are never
//! compared. What must outlive whoever decides is one [`Record`], made durable before anybody is told.
//!
//! Two backends carry it, behind one trait: a server of its own ([`server`]), and [`etcd`], for runs
//! that must outlive any one machine.

mod advert;
mod attendance;
mod backend;
mod call;
mod desk;
pub mod etcd;
mod event;
mod jitter;
mod join;
mod policy;
mod reason;
mod record;
mod refusal;
mod seat;
mod secret;
pub mod server;
mod step;
mod world;

pub use advert::{Address, Advert, Epoch};
pub use attendance::Attendance;
pub use backend::{Backend, RendezvousError, Seat};
pub use call::{Answer, Call, Letter, Say};
pub use desk::{Desk, Reply};
pub use event::{Event, Report};
pub use join::{Join, Seen};
pub use policy::Policy;
pub use reason::Reason;
pub use record::{Cause, Close, Decision, Phase, Place, Record};
pub use refusal::Refusal;
pub use secret::Secret;
pub use step::{Action, Leases, State, Step, step};
