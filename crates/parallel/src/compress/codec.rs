//! Codecs: numbers in fewer bytes.

use std::fmt::Debug;

use tch::Tensor;
use trainyard_cost::Encoding;
use trainyard_torch::Result;

/// A lossy encoding of float32 numbers.
pub trait Codec: Debug + Send + Sync + 'static {
    /// How many bytes numbers become.
    fn encoding(&self) -> Encoding;

    /// Encodes each row of a matrix of float32: the result has as many rows, each of [`Encoding::bytes`] bytes.
    fn encode(&self, rows: &Tensor) -> Result<Tensor>;

    /// Decodes rows of `length` numbers.
    fn decode(&self, encoded: &Tensor, length: usize) -> Result<Tensor>;
}

/// The bytes of a tensor's rows.
pub(super) fn as_bytes(rows: &Tensor) -> Result<Tensor> {
    Ok(rows.f_contiguous()?.f_view_dtype(tch::Kind::Uint8)?)
}

/// Columns `start..start + length` of a matrix of bytes, as rows of numbers of another type, for which `start` must be
/// aligned.
pub(super) fn from_bytes(
    encoded: &Tensor,
    start: usize,
    length: usize,
    kind: tch::Kind,
) -> Result<Tensor> {
    let columns = encoded.f_narrow(1, start as i64, length as i64)?;
    // A copy even of a single row, because the strides of a view of another type must be aligned as well.
    Ok(Tensor::f_cat(&[columns], 0)?.f_view_dtype(kind)?)
}

/// Rows padded with zeros to `length` columns.
pub(super) fn padded(rows: &Tensor, length: usize) -> Result<Tensor> {
    let missing = length as i64 - rows.size2()?.1;
    Ok(match missing {
        0 => rows.shallow_clone(),
        missing => rows.f_constant_pad_nd([0, missing])?,
    })
}
