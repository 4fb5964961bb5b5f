//! Which way to split a model over a cluster, will it fit, how fast will it be, and why.
//!
//! Everything here is arithmetic: a [`Shape`] of a model, a way to split it ([`Strategy`]) and a cluster
//! give bytes and seconds. Nothing computes with tensors, so nothing needs libtorch.

mod cluster;
mod figure;
pub mod framework;
mod hardware;
mod hugging_face;
mod parameters;
mod shape;
mod strategy;

pub use cluster::{Cluster, ClusterError};
pub use figure::{Basis, Figure};
pub use framework::{Framework, FrameworkError};
pub use hardware::Accelerator;
pub use hugging_face::ShapeError;
pub use parameters::BlockParameters;
pub use shape::{Experts, FeedForward, LatentAttention, Norm, Positions, Shape};
pub use strategy::{Degrees, Layers, Offload, Precision, Recompute, Strategy};
