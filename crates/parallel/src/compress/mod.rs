//! Compression of what data-parallel ranks send each other.
//!
//! A [`Codec`] encodes numbers in fewer bytes. An exchange sends encoded numbers and adds them in full precision: in two
//! hops ([`TwoHopReduction`]), as a reduce-scatter and an all-gather, for codecs that shrink every number; or by
//! gathering the few numbers of every rank ([`SparseReduction`]). [`RandomK`] all-reduces a random choice of numbers, and
//! [`PowerSgd`] sends matrices as products of two thin ones. These last three keep what they do not send and add it to the
//! next gradient: error feedback. All are [`GradientHook`]s, which reduce the buckets of DDP. Sharded data parallelism
//! encodes its reduce-scatters and all-gathers with the same codecs.

mod audit;
mod block_quantizer;
mod chunks;
mod codec;
mod error_feedback;
mod exchange;
mod hook;
mod plain;
mod power_sgd;
mod random_k;
mod sparse;
mod top_k;
mod two_bit_top_k;
mod two_hop;

pub use audit::AuditedReduction;
pub use block_quantizer::BlockQuantizer;
pub use codec::Codec;
pub(crate) use exchange::{Gather, ReduceScatter};
pub use hook::{GradientBucket, GradientHook, Reduction};
pub use plain::{CastReduction, PlainReduction};
pub use power_sgd::{PowerSgd, PowerSgdOptions};
pub use random_k::RandomK;
pub use sparse::SparseReduction;
pub use top_k::TopK;
pub use two_bit_top_k::TwoBitTopK;
pub use two_hop::TwoHopReduction;
