//! Layers, in plain and in parallel form.

mod attention;
mod batch_norm;
mod conv;
mod dropout;
mod embedding;
mod gated_mlp;
mod latent_attention;
mod layer_norm;
mod linear;
mod lm_head;
mod position_embedding;
mod qk_norm;
mod rms_norm;
mod rope;

pub use attention::{Attention, AttentionConfig};
pub use batch_norm::BatchNorm;
pub use conv::Conv2d;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use gated_mlp::GatedMlp;
pub use latent_attention::LatentAttention;
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use lm_head::LmHead;
pub use position_embedding::PositionEmbedding;
pub use rms_norm::RmsNorm;
pub use rope::Rope;
