//! Which way to split a model over a cluster, will it fit, how fast will it be, and why.
//!
//! Everything here is arithmetic: a [`Shape`] of a model, a way to split it ([`Strategy`]) and a [`Cluster`]
//! give bytes ([`memory()`]) and seconds ([`time()`]). [`search()`] asks for both of every way there is, and
//! [`explain()`] says why one was chosen. Nothing computes with tensors, so nothing needs libtorch.
//!
//! No number comes without its source. Figures of hardware say whether they are measured, specified or
//! assumed ([`Figure`]). What data sheets do not have is in a few [`Constants`], which [`fit()`] finds from
//! measured runs; a [`Calibration`] says which runs, and how far off it was on runs it had not seen.
//!
//! ```
//! use trainyard_config::{Flavor, LlamaConfig};
//! use trainyard_plan::{Calibration, Cluster, Held, Overheads, Precision, Question, Shape, Software, search};
//!
//! let cluster: Cluster = "64xH100".parse()?;
//! let question = Question {
//!     shape: Shape::from(&LlamaConfig::of(Flavor::Llama3_8b)),
//!     calibration: Calibration::of(&cluster.accelerator, Software::MODERN),
//!     cluster,
//!     overheads: Overheads::default(),
//!     global_batch: 256,
//!     seq_len: 8192,
//!     held: Held::same(Precision::BF16),
//!     fewer_machines: false,
//! };
//! let found = search(&question);
//! let best = &found.plans[0];
//! assert_eq!(best.strategy.degrees.world_size(), 64);
//! assert!(best.memory.total() <= question.cluster.accelerator.memory.value);
//! assert!(best.time.low < best.time.likely && best.time.likely < best.time.high);
//! # Ok::<(), trainyard_plan::ClusterError>(())
//! ```

mod activations;
mod block;
pub mod calibrate;
mod calibration;
mod check;
mod cluster;
mod collective;
pub mod compare;
mod constants;
mod explain;
mod figure;
mod fit;
mod flops;
pub mod framework;
mod hardware;
mod hugging_face;
pub mod machine;
mod memory;
mod model_file;
mod operator;
mod parameters;
mod pipeline;
mod price;
pub mod report;
mod search;
mod shape;
mod software;
mod stages;
mod states;
mod strategy;
mod time;

pub use activations::BlockActivations;
pub use block::BlockTime;
pub use calibration::Calibration;
pub use check::StrategyError;
pub use cluster::{Cluster, ClusterError};
pub use collective::{Group, Wires};
pub use constants::{Constants, NUM_CONSTANTS};
pub use explain::{Binding, Explanation, Flip, Input, Lost, Miss, explain};
pub use figure::{Basis, Figure};
pub use fit::{Run, fit};
pub use flops::{hardware_flops, hardware_flops_utilization, model_flops, model_flops_utilization};
pub use framework::{Framework, FrameworkError};
pub use hardware::Accelerator;
pub use hugging_face::ShapeError;
pub use memory::{Memory, Overheads, memory, peak};
pub use model_file::ModelFileError;
pub use operator::{Operator, Rates, Seconds, block_operators};
pub use parameters::BlockParameters;
pub use pipeline::{StageTime, bubble, in_flight, zero_bubble_h1};
pub use search::{Found, Plan, Question, search, search_mesh};
pub use shape::{Experts, FeedForward, LatentAttention, NoDecoder, Norm, Positions, Shape};
pub use software::{AttentionKernel, Software};
pub use stages::{Holding, RankClass, blocks_of_stage};
pub use states::{LocalParameters, States};
pub use strategy::{Degrees, Held, Layers, Offload, Precision, Recompute, Strategy};
pub use time::{Time, time, time_followed, timeline};
