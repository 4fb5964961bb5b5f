//! A planner for distributed training: how to parallelize a model over a cluster, whether it fits in memory, how
//! fast a step is, and why.
//!
//! Everything here is arithmetic. A model [`DecoderConfig`](trainyard_arch::DecoderConfig), a parallelization [`Strategy`] and a [`Cluster`] determine the
//! bytes on every rank ([`memory()`]) and the seconds of a step ([`time()`]). [`search()`] evaluates every feasible
//! strategy, and [`explain()`] reports why the best one won. The crate creates no tensors and does not link
//! libtorch.
//!
//! Every number carries its source. A hardware figure is measured, specified or assumed ([`SourcedValue`]). Data
//! sheets leave out how far real kernels and links fall short; a few [`Constants`] express that, and [`fit()`]
//! estimates them from measured runs. A [`Calibration`] records which runs were used and the mean error on held-out
//! runs.
//!
//! ```
//! use trainyard_arch::{DecoderConfig, Flavor};
//! use trainyard_plan::{Calibration, Cluster, Overheads, PlanRequest, Precision, PrecisionByStage};
//! use trainyard_plan::{Software, search};
//!
//! let cluster: Cluster = "64xH100".parse()?;
//! let request = PlanRequest {
//!     shape: DecoderConfig::from(Flavor::Llama3_8b),
//!     calibration: Calibration::of(&cluster.accelerator, Software::MODERN),
//!     cluster,
//!     overheads: Overheads::default(),
//!     global_batch: 256,
//!     seq_len: 8192,
//!     precision: PrecisionByStage::same(Precision::BF16),
//!     allow_fewer_nodes: false,
//! };
//! let result = search(&request);
//! let best = &result.plans[0];
//! assert_eq!(best.strategy.degrees.world_size(), 64);
//! assert!(best.memory.total() <= request.cluster.accelerator.memory.value);
//! assert!(best.time.low < best.time.likely && best.time.likely < best.time.high);
//! # Ok::<(), trainyard_plan::ClusterError>(())
//! ```

mod activations;
pub mod any_model;
mod block;
pub mod calibrate;
mod calibration;
mod check;
mod cluster;
mod compression;
mod constants;
pub mod cost_model;
mod estimate;
mod explain;
mod fit;
mod flops;
mod hardware;
mod in_flight;
mod local_updates;
mod memory;
mod moments;
mod network_model;
mod operator;
mod outer_step;
mod overheads;
mod search;
mod sites;
mod slow_network;
mod software;
mod sourced_value;
mod stages;
mod states;
mod strategy;
mod synchronization;
mod time;

pub use activations::BlockActivations;
pub use block::BlockTime;
pub use calibration::Calibration;
pub use check::StrategyError;
pub use cluster::{Cluster, ClusterError};
pub use compression::Compression;
pub use constants::{Constants, NUM_CONSTANTS};
pub use explain::{
    Bottleneck, Explanation, Input, NearestMiss, PlanDiff, Sensitivity, SiteChoice, diff, explain,
};
pub use fit::{Run, fit, fit_to};
pub use flops::{hardware_flops, hardware_flops_utilization, model_flops, model_flops_utilization};
pub use hardware::Accelerator;
pub use local_updates::{LocalUpdateMethod, LocalUpdates};
pub use memory::{Memory, memory, peak};
pub use moments::Moment;
pub use network_model::{Group, NetworkModel};
pub use operator::{ComputeModel, Operator, Seconds, block_operators};
pub use overheads::{Overhead, Overheads};
pub use search::{Plan, PlanRequest, SearchResult, search, search_local_updates, search_mesh};
pub use sites::Sites;
pub use slow_network::{
    Estimate, MethodRow, MethodTable, ReplicaUnit, Threshold, between_nodes, between_sites,
};
pub use software::{AttentionKernel, Generation, Operators, Software};
pub use sourced_value::{Basis, SourcedValue};
pub use stages::{RankClass, RankLayers};
pub use states::{LocalParameters, States};
pub use strategy::{
    Degrees, Offload, PipelineLayout, Precision, PrecisionByStage, Recompute, Strategy,
};
pub use synchronization::Synchronization;
pub use time::{Time, time, time_simulated, timeline};
