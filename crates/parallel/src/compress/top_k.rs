//! Sparsification: the largest numbers of every chunk, with their places.

use tch::{Kind, Tensor};
use trainyard_cost::Encoding;
use trainyard_torch::{Result, meta};

use super::codec::{Codec, as_bytes, from_bytes, padded};

const CHUNK: usize = Encoding::CHUNK;

/// The `k` numbers of the largest magnitude of every chunk of 4096, as bfloat16, with their places. The others are lost,
/// so it needs error feedback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopK {
    k: usize,
}

impl TopK {
    /// Keeps this share of the numbers, and at least one of every chunk.
    pub fn new(share: f64) -> TopK {
        let k = (share * CHUNK as f64).round() as usize;
        TopK {
            k: k.clamp(1, CHUNK),
        }
    }

    fn num_chosen(&self, length: usize) -> usize {
        self.k * length.div_ceil(CHUNK)
    }
}

impl Codec for TopK {
    fn encoding(&self) -> Encoding {
        Encoding::TopK(self.k as u64)
    }

    fn encode(&self, rows: &Tensor) -> Result<Tensor> {
        let (num_rows, length) = rows.size2()?;
        let num_chunks = (length as usize).div_ceil(CHUNK);
        let chunks = padded(rows, num_chunks * CHUNK)?;
        let chunks = chunks.f_view([num_rows, num_chunks as i64, CHUNK as i64])?;
        let (_, places) = chunks.f_abs()?.f_topk(self.k as i64, -1, true, false)?;
        let values = chunks.f_gather(-1, &places, false)?;
        let flat = |x: Tensor, kind| as_bytes(&x.f_to_kind(kind)?.f_view([num_rows, -1])?);
        let values = flat(values, Kind::BFloat16)?;
        Ok(Tensor::f_cat(&[values, flat(places, Kind::Int16)?], 1)?)
    }

    fn decode(&self, encoded: &Tensor, length: usize) -> Result<Tensor> {
        let num_rows = encoded.size2()?.0;
        let num_chunks = length.div_ceil(CHUNK);
        let bytes = 2 * self.num_chosen(length);
        let shape = [num_rows, num_chunks as i64, self.k as i64];
        let values = from_bytes(encoded, 0, bytes, Kind::BFloat16)?.f_view(shape)?;
        let places = from_bytes(encoded, bytes, bytes, Kind::Int16)?.f_view(shape)?;
        let values = values.f_to_kind(Kind::Float)?;
        let shape = [num_rows, num_chunks as i64, CHUNK as i64];
        let chunks = meta::new_zeros(&values, &shape)?;
        let chunks = chunks.f_scatter(-1, &places.f_to_kind(Kind::Int64)?, &values)?;
        Ok(chunks
            .f_view([num_rows, -1])?
            .f_narrow(1, 0, length as i64)?)
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
