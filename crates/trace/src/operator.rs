//! One kernel call.

use serde::{Deserialize, Serialize};

/// One operator that ran on one rank.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Operator {
    /// Its name, such as `aten::mm`.
    pub name: String,
    /// The shapes of its tensor arguments, in order.
    pub shapes: Vec<Vec<i64>>,
    /// When it began.
    pub started_ns: u64,
    /// When it ended.
    pub ended_ns: u64,
    /// Its floating-point operations, as [`flops`](crate::flops()) counts them.
    pub flops: u64,
    /// The thread, as [`current_thread`](crate::current_thread) numbers them.
    pub thread: u64,
}

impl Operator {
    /// How long it took.
    pub fn duration_ns(&self) -> u64 {
        self.ended_ns.saturating_sub(self.started_ns)
    }
}
