//! One machine's part in an elastic run.
//!
//! An agent takes a place in a run through a [rendezvous](trainyard_rendezvous), starts its machine's
//! workers where it is told to, watches them, and stops them when the world they belong to is broken.
//! It also serves the workers' [`store`](Store) when the rendezvous names it for that, so that no
//! worker's end takes the store away.
//!
//! What an agent does next is one pure function of what happened ([`State::after`]); the loop that
//! acts ([`attend`]) has nothing to decide. The lease is kept from that same loop, so an agent that
//! hangs loses its place.

mod attend;
mod decide;
mod error;
mod exchange;
mod line;
mod store;
mod way;

pub use attend::{Attendance, Part, attend};
pub use decide::{Action, Ending, Event, Graces, State};
pub use error::AgentError;
pub use exchange::told;
pub use store::Store;
pub use way::Way;
