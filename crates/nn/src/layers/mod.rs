//! Layers, in plain and in parallel form.

mod attention;
mod conv;
mod dropout;
mod embedding;
mod layer_norm;
mod linear;
mod lm_head;
mod position_embedding;
mod rms_norm;
mod rope;
mod swiglu;

pub use attention::{Attention, AttentionConfig};
pub use conv::Conv2d;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use lm_head::LmHead;
pub use position_embedding::PositionEmbedding;
pub use rms_norm::RmsNorm;
pub use rope::{Rope, RopeScaling};
pub use swiglu::SwiGlu;
