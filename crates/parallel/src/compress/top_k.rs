//! Sparsification: the largest numbers of every chunk, with their places.

use tch::{Kind, Tensor};
use trainyard_cost::Encoding;
use trainyard_torch::Result;

use super::chunks::Chosen;
use super::codec::{Codec, as_bytes, from_bytes};

/// The `k` numbers of the largest magnitude of every chunk of 4096, as bfloat16, with their places. The others are lost,
/// so it needs error feedback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopK {
    k: usize,
}

impl TopK {
    /// Keeps this share of the numbers, and at least one of every chunk.
    pub fn new(share: f64) -> TopK {
        TopK {
            k: Encoding::num_kept(share),
        }
    }
}

impl Codec for TopK {
    fn encoding(&self) -> Encoding {
        Encoding::TopK(self.k as u64)
    }

    fn encode(&self, rows: &Tensor) -> Result<Tensor> {
        let num_rows = rows.size2()?.0;
        let Chosen { values, places } = Chosen::largest(rows, self.k)?;
        let flat = |x: Tensor, kind| as_bytes(&x.f_to_kind(kind)?.f_view([num_rows, -1])?);
        let values = flat(values, Kind::BFloat16)?;
        Ok(Tensor::f_cat(&[values, flat(places, Kind::Int16)?], 1)?)
    }

    fn decode(&self, encoded: &Tensor, length: usize) -> Result<Tensor> {
        let num_chunks = length.div_ceil(Encoding::CHUNK);
        let bytes = 2 * self.k * num_chunks;
        let shape = [encoded.size2()?.0, num_chunks as i64, self.k as i64];
        let values = from_bytes(encoded, 0, bytes, Kind::BFloat16)?.f_view(shape)?;
        let places = from_bytes(encoded, bytes, bytes, Kind::Int16)?.f_view(shape)?;
        let chosen = Chosen {
            values: values.f_to_kind(Kind::Float)?,
            places: places.f_to_kind(Kind::Int64)?,
        };
        chosen.rows(length)
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn the_largest_numbers_survive() {
        let codec = TopK::new(1.0 / 4096.0);
        let x = Tensor::arange(5000, (Kind::Float, Device::Cpu)).view([1, -1]) - 4990.0;
        let encoded = codec.encode(&x).unwrap();
        assert_eq!(encoded.size(), [1, codec.encoding().bytes(5000) as i64]);
        assert_eq!(codec.encoding().bytes(5000), 2 * 4);
        let decoded = codec.decode(&encoded, 5000).unwrap();
        let kept: Vec<i64> = Vec::try_from(decoded.nonzero().select(1, 1)).unwrap();
        assert_eq!(kept, [0, 4096], "the largest magnitude of each chunk");
        let all = TopK::new(1.0);
        let whole = all.decode(&all.encode(&x).unwrap(), 5000).unwrap();
        assert_eq!(whole, x.to_kind(Kind::BFloat16).to_kind(Kind::Float));
    }
}
