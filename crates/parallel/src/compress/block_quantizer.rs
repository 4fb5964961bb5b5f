//! Quantization to 8 bits, with a scale for every block of 256 numbers.

use tch::{Kind, Tensor};
use trainyard_cost::Encoding;
use trainyard_torch::Result;

use super::codec::{Codec, as_bytes, from_bytes, padded};

const BLOCK: usize = Encoding::BLOCK;

/// Bytes of a scale.
const SCALE_BYTES: usize = 4;

/// Numbers of 8 bits with a float32 scale per block. A NaN or an infinity makes its whole block NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockQuantizer {
    /// Integers from -127 to 127: an error of at most 1/254 of the block's largest number.
    Int8,
    /// Floating-point numbers with 3 bits of mantissa (e4m3): an error of at most 1/16 of each number, which is better
    /// where a block contains large and small numbers.
    Fp8,
}

impl BlockQuantizer {
    fn kind(self) -> Kind {
        match self {
            BlockQuantizer::Int8 => Kind::Int8,
            BlockQuantizer::Fp8 => Kind::Float8e4m3fn,
        }
    }

    /// The largest number that the type represents.
    fn max(self) -> f64 {
        match self {
            BlockQuantizer::Int8 => 127.0,
            BlockQuantizer::Fp8 => 448.0,
        }
    }

    /// The largest error of a number, relative to the largest one of its block.
    pub fn max_error(self) -> f64 {
        match self {
            BlockQuantizer::Int8 => 0.5 / 127.0,
            BlockQuantizer::Fp8 => 1.0 / 16.0,
        }
    }
}

impl Codec for BlockQuantizer {
    fn encoding(&self) -> Encoding {
        Encoding::Blocks8
    }

    fn encode(&self, rows: &Tensor) -> Result<Tensor> {
        let (num_rows, length) = rows.size2()?;
        let num_blocks = (length as usize).div_ceil(BLOCK);
        let blocks = padded(rows, num_blocks * BLOCK)?;
        let blocks = blocks.f_view([num_rows, num_blocks as i64, BLOCK as i64])?;
        let scales = blocks
            .f_abs()?
            .f_amax([-1i64], true)?
            .f_div_scalar(self.max())?;
        // A block of zeros has the scale 0 and stays zero.
        let divisors = scales.f_add(&scales.f_eq(0.0)?.f_to_kind(Kind::Float)?)?;
        let scaled = blocks.f_div(&divisors)?;
        let scaled = match self {
            BlockQuantizer::Int8 => scaled.f_round()?,
            BlockQuantizer::Fp8 => scaled,
        };
        let values = scaled.f_to_kind(self.kind())?.f_view([num_rows, -1])?;
        let values = as_bytes(&values.f_narrow(1, 0, length)?)?;
        let scales = as_bytes(&scales.f_view([num_rows, num_blocks as i64])?)?;
        Ok(Tensor::f_cat(&[scales, values], 1)?)
    }

    fn decode(&self, encoded: &Tensor, length: usize) -> Result<Tensor> {
        let num_rows = encoded.size2()?.0;
        let num_blocks = length.div_ceil(BLOCK);
        let scale_bytes = SCALE_BYTES * num_blocks;
        let values =
            from_bytes(encoded, scale_bytes, length, self.kind())?.f_to_kind(Kind::Float)?;
        let scales = from_bytes(encoded, 0, scale_bytes, Kind::Float)?;
        let blocks = padded(&values, num_blocks * BLOCK)?;
        let blocks = blocks.f_view([num_rows, num_blocks as i64, BLOCK as i64])?;
        let decoded = blocks
            .f_mul(&scales.f_unsqueeze(-1)?)?
            .f_view([num_rows, -1])?;
        Ok(decoded.f_narrow(1, 0, length as i64)?)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tch::Device;

    use super::*;

    fn random(rows: i64, length: i64, seed: i64) -> Tensor {
        tch::manual_seed(seed);
        Tensor::randn([rows, length], (Kind::Float, Device::Cpu))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn errors_are_within_the_bound(rows in 1i64..4, length in 1i64..700, seed in 0i64..100, fp8: bool) {
            let codec = if fp8 { BlockQuantizer::Fp8 } else { BlockQuantizer::Int8 };
            let x = random(rows, length, seed);
            let encoded = codec.encode(&x).unwrap();
            prop_assert_eq!(encoded.size2().unwrap(), (rows, codec.encoding().bytes(length as u64) as i64));
            let decoded = codec.decode(&encoded, length as usize).unwrap();
            let num_blocks = (length as usize).div_ceil(BLOCK) * BLOCK;
            let blocks = padded(&x, num_blocks).unwrap().view([rows, -1, BLOCK as i64]);
            let error = padded(&(decoded - &x), num_blocks).unwrap().view([rows, -1, BLOCK as i64]);
            let bound = blocks.abs().amax([-1i64], false) * (codec.max_error() * 1.0001);
            let excess = (error.abs().amax([-1i64], false) - bound).max().double_value(&[]);
            prop_assert!(excess <= 0.0, "{excess}");
        }
    }

    #[test]
    fn zeros_stay_zero_and_a_nan_is_not_hidden() {
        for codec in [BlockQuantizer::Int8, BlockQuantizer::Fp8] {
            let decode = |x: &Tensor| {
                codec
                    .decode(&codec.encode(x).unwrap(), x.size2().unwrap().1 as usize)
                    .unwrap()
            };
            let zeros = Tensor::zeros([1, 300], (Kind::Float, Device::Cpu));
            assert_eq!(decode(&zeros), zeros);
            for bad in [f64::NAN, f64::INFINITY] {
                let x = zeros.copy();
                let _ = x.get(0).get(299).fill_(bad);
                let decoded = decode(&x);
                assert_eq!(decoded.isnan().any().int64_value(&[]), 1, "{codec:?} {bad}");
            }
        }
    }
}
