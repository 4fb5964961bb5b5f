//! The operations of a step, for the throughput that a job reports.

use trainyard_config::ModelSpec;

/// FLOPs per target token: those of the matrix products, and of attention without its mask.
pub(crate) fn flops_per_target(spec: &ModelSpec, seq_len: usize) -> f64 {
    match spec.decoder() {
        Some(decoder) => decoder.flops_per_token(seq_len),
        None => {
            // A convolution uses each weight once per pixel.
            let convolutions = (9 * 32 + 9 * 32 * 64) * 28 * 28;
            6.0 * f64::from(convolutions + 64 * 28 * 28 * 128 + 128 * 10)
        }
    }
}
