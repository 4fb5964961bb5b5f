//! Rows as chunks of numbers, of which the largest are chosen.

use tch::Tensor;
use trainyard_cost::Encoding;
use trainyard_torch::{Result, meta};

use super::codec::padded;

const CHUNK: usize = Encoding::CHUNK;

/// The chosen numbers of every chunk of every row.
pub(super) struct Chosen {
    pub values: Tensor,
    /// Their places in the chunk.
    pub places: Tensor,
}

impl Chosen {
    /// The `k` numbers of the largest magnitude of every chunk.
    pub(super) fn largest(rows: &Tensor, k: usize) -> Result<Chosen> {
        let (num_rows, length) = rows.size2()?;
        let num_chunks = (length as usize).div_ceil(CHUNK);
        let chunks = padded(rows, num_chunks * CHUNK)?;
        let chunks = chunks.f_view([num_rows, num_chunks as i64, CHUNK as i64])?;
        let (_, places) = chunks.f_abs()?.f_topk(k as i64, -1, true, false)?;
        Ok(Chosen {
            values: chunks.f_gather(-1, &places, false)?,
            places,
        })
    }

    /// Rows of `length` numbers that are zero where none was chosen.
    pub(super) fn rows(&self, length: usize) -> Result<Tensor> {
        let (num_rows, num_chunks, _) = self.values.size3()?;
        let chunks = meta::new_zeros(&self.values, &[num_rows, num_chunks, CHUNK as i64])?;
        let chunks = chunks.f_scatter(-1, &self.places, &self.values)?;
        Ok(chunks
            .f_view([num_rows, -1])?
            .f_narrow(1, 0, length as i64)?)
    }
}
