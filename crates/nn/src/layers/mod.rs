//! Layers: small modules that compute one thing each, alone or with ranks that share them.

mod attention;
mod conv;
mod dropout;
mod embedding;
mod head;
mod layer_norm;
mod linear;
mod positions;
mod rms_norm;
mod rope;
mod swiglu;

pub use attention::{Attention, AttentionSizes};
pub use conv::Conv2d;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use head::LanguageHead;
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use positions::Positions;
pub use rms_norm::RmsNorm;
pub use rope::{Rope, RopeScaling};
pub use swiglu::SwiGlu;
