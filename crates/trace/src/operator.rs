//! Operator calls.

use serde::{Deserialize, Serialize};

/// One call of an operator on one rank.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Operator {
    /// The name of the operator, such as `aten::mm`.
    pub name: String,
    /// The shapes of the tensor arguments, in order.
    pub shapes: Vec<Vec<i64>>,
    /// The bytes of the tensor arguments; 0 if the result is a view of them, which reads nothing.
    pub input_bytes: u64,
    /// The bytes of the results; 0 if they are views.
    pub output_bytes: u64,
    /// When the call began.
    pub started_ns: u64,
    /// When the call ended.
    pub ended_ns: u64,
    /// The floating-point operations, as [`flops`](crate::flops()) counts them.
    pub flops: u64,
    /// The number of the calling thread, see [`current_thread`](crate::current_thread).
    pub thread: u64,
}

impl Operator {
    /// The duration of the call.
    pub fn duration_ns(&self) -> u64 {
        self.ended_ns.saturating_sub(self.started_ns)
    }
}
