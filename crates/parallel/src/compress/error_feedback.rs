//! Error feedback: what is not sent of one gradient is added to the next.
//!
//! Over all steps, what was sent and the remaining error add up to the gradients.

use tch::{Kind, Tensor};
use trainyard_torch::Result;

use super::codec::Codec;

/// Gradients in float32, with the error of earlier steps.
pub(super) fn corrected(gradients: &Tensor, error: Option<&Tensor>) -> Result<Tensor> {
    let gradients = gradients.f_to_kind(Kind::Float)?;
    match error {
        Some(error) => Ok(gradients.f_add(error)?),
        None => Ok(gradients),
    }
}

/// Replaces the error by what of `corrected` was not sent. Of a number that is not finite, nothing is kept: the step that it
/// belongs to is skipped, and the error would never be finite again.
pub(super) fn keep(error: Option<&Tensor>, corrected: &Tensor, sent: &Tensor) -> Result<()> {
    if let Some(error) = error {
        let rest = corrected.f_sub(sent)?.f_nan_to_num(0.0, 0.0, 0.0)?;
        let mut error = error.shallow_clone();
        tch::no_grad(|| error.f_copy_(&rest.f_view_as(&error)?))?;
    }
    Ok(())
}

/// Encodes a flat gradient together with its error as one row, and replaces the error.
pub(super) fn encode(codec: &dyn Codec, flat: &Tensor, error: Option<&Tensor>) -> Result<Tensor> {
    let corrected = corrected(flat, error)?.f_view([1, -1])?;
    let encoded = codec.encode(&corrected)?;
    if error.is_some() {
        let sent = codec.decode(&encoded, flat.numel())?;
        keep(error, &corrected, &sent)?;
    }
    Ok(encoded)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tch::Device;

    use super::*;
    use crate::compress::{BlockQuantizer, TopK, TwoBitTopK};

    /// One step whose gradients are not finite leaves no trace in the error.
    #[test]
    fn errors_stay_finite() {
        let error = Tensor::zeros([10], (Kind::Float, Device::Cpu));
        let bad = Tensor::from_slice(&[
            1.0f32,
            f32::NAN,
            f32::INFINITY,
            2.0,
            3.0,
            4.0,
            5.0,
            6.0,
            7.0,
            8.0,
        ]);
        let encoded = encode(&BlockQuantizer::Int8, &bad, Some(&error)).unwrap();
        assert_eq!(encoded.size2().unwrap().0, 1);
        assert_eq!(error.isfinite().all().int64_value(&[]), 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn what_was_sent_and_the_error_add_up(length in 1i64..5000, seed in 0i64..100) {
            let codecs: [&dyn Codec; 4] = [
                &BlockQuantizer::Int8, &BlockQuantizer::Fp8, &TopK::new(0.01), &TwoBitTopK::new(0.01),
            ];
            for codec in codecs {
                tch::manual_seed(seed);
                let error = Tensor::zeros([length], (Kind::Float, Device::Cpu));
                let zeros = Tensor::zeros([length], (Kind::Double, Device::Cpu));
                let (mut gradients, mut sent) = (zeros.copy(), zeros);
                for _ in 0..5 {
                    let gradient = Tensor::randn([length], (Kind::Float, Device::Cpu));
                    gradients += &gradient;
                    let encoded = encode(codec, &gradient, Some(&error)).unwrap();
                    sent += codec.decode(&encoded, length as usize).unwrap().view([length]);
                }
                let off = (gradients - sent - error).abs().max().double_value(&[]);
                prop_assert!(off < 1e-4, "{codec:?}: {off}");
            }
        }
    }
}
