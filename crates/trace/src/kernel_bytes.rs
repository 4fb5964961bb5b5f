//! The memory traffic of an operator's kernel.

use serde::{Deserialize, Serialize};

use crate::Operator;

/// The bytes that a kernel reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KernelBytes {
    /// Bytes read from memory.
    pub read: u64,
    /// Bytes written to memory.
    pub written: u64,
}

impl KernelBytes {
    /// The bytes moved.
    pub const fn total(&self) -> u64 {
        self.read + self.written
    }
}

/// Operators without a kernel of their own that are neither views nor allocations.
const NO_KERNEL: [&str; 6] = [
    "result_type",
    "item",
    "_local_scalar_dense",
    "detach_",
    "resize_",
    "set_",
];

/// Namespaces of communication and of autograd's nodes, whose operators are recorded beside them.
const OTHER_NAMESPACES: [&str; 3] = ["c10d", "torch", "autograd"];

/// The traffic of an operator that calls no other with a kernel; `None` if it starts none.
///
/// An operator reads its inputs and writes its outputs, with few exceptions. A view and an allocation do neither. A
/// name without a namespace is a node of autograd, whose operators are recorded beside it.
pub(crate) fn kernel_bytes(operator: &Operator) -> Option<KernelBytes> {
    let (namespace, name) = operator.name.split_once("::")?;
    let base = name.split('.').next().unwrap_or(name);
    let (read, written) = (operator.input_bytes, operator.output_bytes);
    let has_none = base.contains("empty") || NO_KERNEL.contains(&base);
    if OTHER_NAMESPACES.contains(&namespace) || has_none || read + written == 0 {
        return None;
    }
    let (read, written) = match base {
        // Only the selected rows of a table are read.
        "embedding" | "index_select" | "index" | "gather" => (written, written),
        "zero_" | "fill_" | "zeros" | "ones" | "full" => (0, written),
        // The destination is an input as well, and is not read.
        "copy_" => (read.saturating_sub(written), written),
        // These return nothing, and write to all but their gradients.
        "_fused_adam_" | "_fused_adamw_" => (read, read / 4 * 3),
        "_fused_sgd_" => (read, read / 2),
        _ if base.starts_with("_foreach_") && base.ends_with('_') => (read, read),
        _ => (read, written),
    };
    Some(KernelBytes { read, written })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(name: &str, input_bytes: u64, output_bytes: u64) -> Option<(u64, u64)> {
        let operator = Operator {
            name: name.to_owned(),
            shapes: Vec::new(),
            input_bytes,
            output_bytes,
            started_ns: 0,
            ended_ns: 1,
            flops: 0,
            thread: 0,
        };
        kernel_bytes(&operator).map(|bytes| (bytes.read, bytes.written))
    }

    #[test]
    fn a_kernel_reads_inputs_and_writes_outputs() {
        assert_eq!(bytes("aten::add", 8, 4), Some((8, 4)));
        assert_eq!(bytes("aten::copy_", 8, 4), Some((4, 4)));
        assert_eq!(bytes("aten::zero_", 4, 4), Some((0, 4)));
        assert_eq!(bytes("aten::embedding", 1000, 4), Some((4, 4)));
        assert_eq!(bytes("mine::rotate", 4, 4), Some((4, 4)));
        assert_eq!(bytes("aten::_fused_adamw_", 16, 0), Some((16, 12)));
        assert_eq!(bytes("aten::_foreach_mul_", 8, 0), Some((8, 8)));
    }

    #[test]
    fn views_allocations_and_autograd_nodes_have_no_kernel() {
        for name in ["aten::t", "aten::sum"] {
            assert_eq!(bytes(name, 0, 0), None);
        }
        for name in [
            "aten::empty.memory_format",
            "aten::new_empty",
            "AddmmBackward0",
            "torch::autograd::AccumulateGrad",
            "c10d::allreduce_",
        ] {
            assert_eq!(bytes(name, 4, 4), None, "{name}");
        }
    }
}
