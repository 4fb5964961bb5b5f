//! What `trainyard verify` runs on each rank, and how it judges what they computed.

pub mod compare;
pub mod rank;
