//! The parameter server of asynchronous training.
//!
//! Servers hold the parameters and the optimizer states; workers pull parameters, compute gradients, and push them. No worker
//! waits for another one, except that no work of a step begins before that of earlier steps is nearly complete: the
//! staleness bound of stale synchronous parallel training. With a bound of 0, training is synchronous.
//!
//! - [`WorkQueue`] decides which samples a worker computes next, and which gradients are applied next. It is a state machine
//!   without clocks and sockets.
//! - [`ParameterServer`] keeps the newest parameters for workers that pull them, and the gradients that they push.
//! - [`ServerGroup`] is a worker's connection to all servers.
//! - [`Rows`] are the rows of embedding tables that a piece needs: of a table, workers pull and push only these.
//!
//! The servers of a run form a world of their own: each holds a shard of every parameter, and they apply the same updates
//! in the order that the first one, the leader, decides. A worker pushes to the leader last, so a gradient that the
//! leader has is on all servers.
//!
//! This is a crate of its own because it needs neither tensors nor a launcher.

mod chunks;
mod client;
mod environment;
mod protocol;
mod rows;
mod server;
mod work_queue;

pub use client::{ClientError, LEASE_RENEWAL, ServerGroup};
pub use environment::{EnvironmentError, IS_SERVER, NUM_WORKERS, RANKS_PER_WORKER, Role, SERVERS};
pub use protocol::{JobInfo, ParamShard, PieceGradient, Pulled, Table, Taken};
pub use rows::{Part, RowBlock, Rows};
pub use server::ParameterServer;
pub use work_queue::{
    Piece, Progress, Take, Update, UpdateRule, WorkQueue, WorkQueueOptions, WorkerId,
};
