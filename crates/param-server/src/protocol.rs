//! Messages between workers and servers.
//!
//! A message is JSON. The gradients of a push follow their header, and the parameters of a pull follow the reply, as raw
//! bytes in [chunks](crate::chunks): the elements of every [`ParamShard`] of the server, in order, as its
//! tensors have them in memory (little endian). Of an embedding table, they are those of some [`Rows`](crate::Rows), whose numbers follow
//! the header of a push or of a request to pull.

use std::num::NonZero;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use trainyard_tls::MessageProtocol;

use crate::work_queue::{Piece, WorkerId};

/// A description of the shards of a large model takes some megabytes.
pub(crate) const PROTOCOL: MessageProtocol = MessageProtocol {
    server_name: "parameter server",
    max_message_bytes: 16 << 20,
};

/// The elements of a parameter that a server holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamShard {
    /// The name of the parameter.
    pub name: String,
    /// Intervals of the flattened parameter, in order.
    pub elements: Vec<Range<usize>>,
    /// Bytes of one element.
    pub element_bytes: usize,
    /// Whether workers push its gradient; they pull all shards.
    pub is_trainable: bool,
    /// Set if it is an embedding table, of which workers need some rows.
    pub table: Option<Table>,
}

/// The shape of an embedding table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// The number of rows.
    pub height: usize,
    /// The elements of a row.
    pub width: NonZero<usize>,
}

impl ParamShard {
    /// The bytes of the shard.
    pub fn num_bytes(&self) -> usize {
        self.elements.iter().map(Range::len).sum::<usize>() * self.element_bytes
    }
}

/// A worker's answer from the leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It computes this piece, with the parameters after at least this many updates.
    Work(Piece, u64),
    /// It asks again.
    NotYet,
    /// It exits.
    Done,
}

/// What a worker must know of the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobInfo {
    /// A digest of the config and the program: both must be the same for all.
    pub digest: String,
    /// Samples of a step.
    pub global_batch: usize,
    /// Pieces of a step, if all have the same size.
    pub pieces_per_step: usize,
    /// Whether gradients of one step are applied together.
    pub is_synchronous: bool,
    /// What this server holds.
    pub shards: Vec<ParamShard>,
}

impl JobInfo {
    /// The shards whose gradients workers push.
    pub fn trained_shards(&self) -> impl Iterator<Item = &ParamShard> + Clone {
        self.shards.iter().filter(|shard| shard.is_trainable)
    }

    /// The rows of the highest table; 0 if there is none.
    pub fn max_rows(&self) -> usize {
        let tables = self.shards.iter().filter_map(|shard| shard.table);
        tables.map(|table| table.height).max().unwrap_or(0)
    }
}

/// What a worker says of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PieceGradient {
    /// Who has computed it.
    pub worker: WorkerId,
    /// The samples that it is of.
    pub piece: Piece,
    /// The version of the parameters that it was computed with.
    pub version: u64,
    /// The number of targets.
    pub num_targets: i64,
    /// The summed loss of the targets, divided by the nominal number of targets of a step.
    pub loss: f64,
    /// Seconds of the computation.
    pub seconds: f64,
}

/// The parameters of all servers, each with its shards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// The number of updates of the leader's parameters.
    pub version: u64,
    /// The bytes of every server.
    pub servers: Vec<Vec<u8>>,
}

/// A request of a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Asks what the server holds.
    Describe,
    /// Joins the run; only the leader is asked.
    Join,
    /// Asks for the next piece; only the leader is asked.
    Take,
    /// Asks for the parameters after at least this many updates. The numbers of the rows follow.
    Pull { version: u64, num_rows: usize },
    /// Sends a gradient. The numbers of its rows follow, then its bytes.
    Push {
        gradient: PieceGradient,
        num_rows: usize,
    },
    /// Renews the lease of the worker.
    Heartbeat,
}

/// A server's reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The answer to `Describe`.
    Job(JobInfo),
    /// The answer to `Join`.
    Joined(WorkerId),
    /// The piece to compute, and the version of the parameters that it needs at least.
    Piece { piece: Piece, version: u64 },
    /// All gradients have been applied.
    Done,
    /// Ask again.
    NotYet,
    /// The parameters; their bytes follow.
    Parameters { version: u64, num_bytes: usize },
    /// The gradient, or the heartbeat, has arrived.
    Received,
    /// The request is not one of this protocol, or of this worker.
    Rejected(String),
}
