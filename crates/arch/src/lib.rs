//! What a decoder-only transformer is, without libtorch: its dimensions and the details in which families differ, its
//! parameters and their sharding, its FLOPs, and Hugging Face's `config.json` in both directions.
//!
//! The config resolves to a [`DecoderConfig`], the planner counts it, and the model crate builds it. A family is one file in
//! `family`: how its `config.json` is read and written.

mod check;
mod decoder_config;
mod error;
mod family;
mod flavor;
mod flops;
mod fused_projection;
mod latent_attention;
mod moe;
mod parameters;
mod rope;
mod sliding_window;
mod vit;

pub use check::nearest_divisor;
pub use decoder_config::{
    Activation, DecoderConfig, FeedForward, Norm, NormPlacement, Positions, QkNorm,
};
pub use error::ArchError;
pub use flavor::Flavor;
pub use fused_projection::FusedProjection;
pub use latent_attention::LatentAttention;
pub use moe::{BIAS_UPDATE_RATE, GroupScore, MoeConfig, RoutingGroups, ScoringFunc};
pub use parameters::{BlockKind, BlockParameters, ParameterSpec, Sharding};
pub use rope::{RopeScaling, rotary_frequencies};
pub use sliding_window::SlidingWindow;
pub use vit::VitConfig;
