//! The operations of a step, for the throughput that a job reports.

use trainyard_config::ModelSpec;

use crate::build;
use crate::error::Result;
use crate::train_spec::TrainSpec;

/// FLOPs per target token: those of the matrix products, and of attention without its mask. For a registered model,
/// those of using every parameter once.
pub(crate) fn flops_per_target(spec: &TrainSpec) -> Result<f64> {
    Ok(match spec.model.resolve()? {
        ModelSpec::Decoder(decoder) => decoder.flops_per_token(spec.training.seq_len),
        ModelSpec::Cnn => {
            // A convolution uses each weight once per pixel.
            let convolutions = (9 * 32 + 9 * 32 * 64) * 28 * 28;
            6.0 * f64::from(convolutions + 64 * 28 * 28 * 128 + 128 * 10)
        }
        ModelSpec::Vit(vit) => vit.flops_per_image(),
        ModelSpec::Custom(_) => 6.0 * build::num_parameters(spec)? as f64,
    })
}
