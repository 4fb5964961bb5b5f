//! Sparsification with values of two bits, as in SparseLoCo.

use tch::{Kind, Tensor};
use trainyard_cost::Encoding;
use trainyard_torch::Result;

use super::chunks::Chosen;
use super::codec::{Codec, as_bytes, from_bytes};

/// Bytes of a scale.
const SCALE_BYTES: usize = 4;
/// The two magnitudes of values, relative to the mean of their chunk, and the limit between them.
const SMALL: f64 = 2.0 / 3.0;
const LARGE: f64 = 2.0;
const LIMIT: f64 = 4.0 / 3.0;
/// The bits of a number: 12 of its place, one of its sign, one of its magnitude.
const SIGN: i64 = 1 << 12;
const MAGNITUDE: i64 = 1 << 13;

/// The `k` numbers of the largest magnitude of every chunk of 4096, each in 16 bits: its place, its sign, and one of two
/// magnitudes, with a float32 scale per chunk. It needs error feedback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TwoBitTopK {
    k: usize,
}

impl TwoBitTopK {
    /// Keeps this share of the numbers, and at least one of every chunk.
    pub fn new(share: f64) -> TwoBitTopK {
        TwoBitTopK {
            k: Encoding::num_kept(share),
        }
    }
}

impl Codec for TwoBitTopK {
    fn encoding(&self) -> Encoding {
        Encoding::TwoBitTopK(self.k as u64)
    }

    fn encode(&self, rows: &Tensor) -> Result<Tensor> {
        let num_rows = rows.size2()?.0;
        let Chosen { values, places } = Chosen::largest(rows, self.k)?;
        let magnitudes = values.f_abs()?;
        let scales = magnitudes.f_mean_dim([-1i64].as_slice(), true, Kind::Float)?;
        let bit = |is_set: Tensor, bit: i64| is_set.f_to_kind(Kind::Int64)?.f_mul_scalar(bit);
        let is_large = magnitudes.f_gt_tensor(&scales.f_mul_scalar(LIMIT)?)?;
        let codes = places
            .f_add(&bit(values.f_lt(0.0)?, SIGN)?)?
            .f_add(&bit(is_large, MAGNITUDE)?)?;
        let codes = codes.f_to_kind(Kind::Int16)?.f_view([num_rows, -1])?;
        let scales = as_bytes(&scales.f_view([num_rows, -1])?)?;
        Ok(Tensor::f_cat(&[scales, as_bytes(&codes)?], 1)?)
    }

    fn decode(&self, encoded: &Tensor, length: usize) -> Result<Tensor> {
        let num_rows = encoded.size2()?.0;
        let num_chunks = length.div_ceil(Encoding::CHUNK);
        let scale_bytes = SCALE_BYTES * num_chunks;
        let shape = [num_rows, num_chunks as i64, self.k as i64];
        let scales = from_bytes(encoded, 0, scale_bytes, Kind::Float)?;
        let bytes = 2 * self.k * num_chunks;
        let codes = from_bytes(encoded, scale_bytes, bytes, Kind::Int16)?;
        let codes = codes.f_to_kind(Kind::Int64)?.f_view(shape)?;
        let is_set = |bit: i64| codes.f_bitwise_and(bit)?.f_ne(0.0)?.f_to_kind(Kind::Float);
        let sign = is_set(SIGN)?.f_mul_scalar(-2.0)?.f_add_scalar(1.0)?;
        let magnitude = is_set(MAGNITUDE)?
            .f_mul_scalar(LARGE - SMALL)?
            .f_add_scalar(SMALL)?;
        let chosen = Chosen {
            values: sign.f_mul(&magnitude)?.f_mul(&scales.f_unsqueeze(-1)?)?,
            places: codes.f_bitwise_and(SIGN - 1)?,
        };
        chosen.rows(length)
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn signs_and_places_survive() {
        let x = Tensor::zeros([1, 5000], (Kind::Float, Device::Cpu));
        for (place, value) in [(7, -1.0), (4095, 3.0), (4999, -2.0)] {
            let _ = x.get(0).get(place).fill_(value);
        }
        let codec = TwoBitTopK::new(2.0 / 4096.0);
        let encoded = codec.encode(&x).unwrap();
        assert_eq!(encoded.size(), [1, codec.encoding().bytes(5000) as i64]);
        let decoded = codec.decode(&encoded, 5000).unwrap();
        let at = |place: i64| decoded.double_value(&[0, place]);
        // The mean magnitudes of the chunks are 2 and 1.
        assert!((at(7) + 4.0 / 3.0).abs() < 1e-6, "{}", at(7));
        assert!((at(4095) - 4.0).abs() < 1e-6, "{}", at(4095));
        assert!((at(4999) + 2.0).abs() < 1e-6, "{}", at(4999));
    }
}
