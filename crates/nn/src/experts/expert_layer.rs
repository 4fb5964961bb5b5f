//! What the experts of a layer compute.

use std::fmt::Debug;

use tch::Tensor;

use crate::{Module, Result};

/// The experts of a layer that this rank has. The layer routes tokens, sends them to the ranks of their experts, and adds up
/// what comes back; this is all that it asks of its experts.
///
/// Parameters are built with [`Builder::experts`](crate::Builder::experts): one tensor for all experts of the layer, with the
/// experts along dim 0, of which this rank holds some.
pub trait Experts: Module + Debug {
    /// The outputs for `x` [rows, width], whose rows are sorted by expert: `num_rows[e]` of this rank's expert `e`.
    fn forward(&self, x: &Tensor, num_rows: &[i64]) -> Result<Tensor>;
}

/// The outputs of `expert(e, rows)` for the rows of every expert `e`. An expert without rows is called too, so that its
/// parameters have gradients of zeros.
pub fn for_each_expert(
    x: &Tensor,
    num_rows: &[i64],
    mut expert: impl FnMut(i64, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let rows = x.f_split_with_sizes(num_rows, 0)?;
    let outputs = (0..).zip(&rows).map(|(index, rows)| expert(index, rows));
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    Ok(Tensor::f_cat(&outputs, 0)?)
}
