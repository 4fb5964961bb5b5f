//! What all forms of data parallelism share: parameters in groups, and each group's tensors in one flat tensor.
//!
//! Replication and ZeRO differ in what they keep, not in how gradients reach a collective. A group's gradients are
//! views of one flat tensor ([`FlatGrads`]), so that one collective reduces all of them without a copy. Replication
//! groups parameters by size, in the order in which backward completes them, and all-reduces a group as soon as it is
//! complete. ZeRO groups them by unit, or several units up to a size, because a group is also what is gathered and
//! released, and that happens where units begin and end.

mod bucket;
mod flat_grads;
mod flat_param;
mod flat_tensor;
mod param_groups;

pub use bucket::{BucketLimits, assign_buckets};
pub(crate) use flat_grads::FlatGrads;
pub use flat_param::FlatParam;
pub(crate) use flat_tensor::{view_as, without_storage, zeros_flat};
pub(crate) use param_groups::{in_order_of_use, params_of_units};
