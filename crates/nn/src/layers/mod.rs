//! Layers: small modules that compute one thing each, free of parallel code.

mod attention;
mod conv;
mod embedding;
mod linear;
mod rms_norm;
mod rope;
mod swiglu;

pub use attention::{Attention, AttentionSizes};
pub use conv::Conv2d;
pub use embedding::Embedding;
pub use linear::Linear;
pub use rms_norm::RmsNorm;
pub use rope::Rope;
pub use swiglu::SwiGlu;
