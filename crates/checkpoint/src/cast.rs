//! Converts elements between floating-point types.

use half::{bf16, f16};
use safetensors::Dtype;

/// Whether tensors of this type can be cast.
pub(crate) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

/// The little-endian elements as another type, each rounded once to the nearest value. Other types than
/// [floats](is_float) stay as they are.
pub(crate) fn cast(bytes: Vec<u8>, from: Dtype, to: Dtype) -> Vec<u8> {
    if from == to || !is_float(from) || !is_float(to) {
        return bytes;
    }
    // Every one of these types is exact in 64 bits.
    let exact: Vec<f64> = match from {
        Dtype::F64 => elements(&bytes, f64::from_le_bytes),
        Dtype::F32 => elements(&bytes, |bytes| f32::from_le_bytes(bytes).into()),
        Dtype::BF16 => elements(&bytes, |bytes| bf16::from_le_bytes(bytes).into()),
        _ => elements(&bytes, |bytes| f16::from_le_bytes(bytes).into()),
    };
    match to {
        Dtype::F64 => bytes_of(exact, f64::to_le_bytes),
        Dtype::F32 => bytes_of(exact, |value| (value as f32).to_le_bytes()),
        Dtype::BF16 => bytes_of(exact, |value| bf16::from_f64(value).to_le_bytes()),
        _ => bytes_of(exact, |value| f16::from_f64(value).to_le_bytes()),
    }
}

fn elements<const N: usize>(bytes: &[u8], read: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| read(bytes))
        .collect()
}

fn bytes_of<const N: usize>(values: Vec<f64>, write: impl Fn(f64) -> [u8; N]) -> Vec<u8> {
    values.into_iter().flat_map(write).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TYPES: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::BF16, Dtype::F16];

    #[test]
    fn values_are_rounded_to_the_nearest() {
        let shortened = cast(
            vec_of(&[1.0, 1.003, -2.5, f32::INFINITY]),
            Dtype::F32,
            Dtype::BF16,
        );
        let expected = [1.0, 1.0, -2.5, f32::INFINITY].map(bf16::from_f32);
        assert_eq!(shortened, expected.map(bf16::to_le_bytes).concat());
    }

    #[test]
    fn integers_stay() {
        assert_eq!(cast(vec![1, 2, 3], Dtype::U8, Dtype::F32), [1, 2, 3]);
    }

    fn vec_of(values: &[f32]) -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    }

    proptest! {
        #[test]
        fn a_wider_type_and_back_is_the_same(values in prop::collection::vec(-1e4f32..1e4, 0..20), narrow in 0usize..4) {
            let narrow = TYPES[narrow];
            let original = cast(vec_of(&values), Dtype::F32, narrow);
            let wide = cast(original.clone(), narrow, Dtype::F64);
            prop_assert_eq!(wide.len(), 8 * values.len());
            prop_assert_eq!(cast(wide, Dtype::F64, narrow), original);
        }
    }
}
