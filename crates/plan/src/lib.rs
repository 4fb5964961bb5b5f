//! Which way to split a model over a cluster, will it fit, how fast will it be, and why.
//!
//! Everything here is arithmetic: a [`Shape`] of a model, a way to split it ([`Strategy`]) and a cluster
//! give bytes and seconds. Nothing computes with tensors, so nothing needs libtorch.

mod activations;
mod block;
mod calibration;
mod cluster;
mod collective;
mod constants;
mod figure;
mod fit;
mod flops;
mod hardware;
mod hugging_face;
mod memory;
mod operator;
mod parameters;
mod pipeline;
mod shape;
mod software;
mod stages;
mod states;
mod strategy;
mod time;

pub use activations::BlockActivations;
pub use block::BlockTime;
pub use calibration::Calibration;
pub use cluster::{Cluster, ClusterError};
pub use collective::{Group, Wires};
pub use constants::{Constants, NUM_CONSTANTS};
pub use figure::{Basis, Figure};
pub use fit::{Run, fit};
pub use flops::{hardware_flops, hardware_flops_utilization, model_flops, model_flops_utilization};
pub use hardware::Accelerator;
pub use hugging_face::ShapeError;
pub use memory::{Memory, Overheads, memory, peak};
pub use operator::{Operator, Rates, Seconds, block_operators};
pub use parameters::BlockParameters;
pub use pipeline::{StageTime, bubble, in_flight};
pub use shape::{Experts, FeedForward, LatentAttention, Norm, Positions, Shape};
pub use software::{AttentionKernel, Software};
pub use stages::{Holding, RankClass, blocks_of_stage};
pub use states::{LocalParameters, States};
pub use strategy::{Degrees, Layers, Offload, Precision, Recompute, Strategy};
pub use time::{Time, time, time_followed};
