//! Layers: small modules that compute one thing each, alone or with ranks that share them.

mod attention;
mod conv;
mod dropout;
mod embedding;
mod linear;
mod rms_norm;
mod rope;
mod swiglu;

pub use attention::{Attention, AttentionSizes};
pub use conv::Conv2d;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use linear::Linear;
pub use rms_norm::RmsNorm;
pub use rope::Rope;
pub use swiglu::SwiGlu;
