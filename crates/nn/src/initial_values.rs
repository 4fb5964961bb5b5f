//! The initial values of a parameter: random ones here, those of a file in [`weights`](crate::weights).
//!
//! Any interval of a parameter's elements can be written alone. So a strategy that keeps a shard of a deferred
//! parameter never needs the memory of all of it.

use std::ops::Range;

use tch::{Kind, Tensor};
use trainyard_mesh::Region;

use crate::{Init, Result};

/// Elements that are computed at a time, which bounds the temporary memory.
const CHUNK: usize = 1 << 20;

/// Computes the initial values of this rank's elements of a parameter.
pub(crate) trait InitialValues {
    /// Writes these elements, counted in row-major order, to a flat tensor of as many elements.
    fn write(&self, elements: Range<usize>, target: &Tensor) -> Result<()>;
}

/// No values, for devices that compute none.
pub(crate) struct Undefined;

impl InitialValues for Undefined {
    fn write(&self, _elements: Range<usize>, _target: &Tensor) -> Result<()> {
        Ok(())
    }
}

/// Values that depend on the seed, the name of the parameter and the position of the element.
pub(crate) struct RandomValues {
    pub name: String,
    pub init: Init,
    pub seed: u64,
    /// The global shape.
    pub shape: Vec<usize>,
    /// The region of the parameter that this rank holds.
    pub region: Region,
    /// The dtype of the parameter. Values are rounded to it before they are written to tensors of another one.
    pub kind: Kind,
}

impl InitialValues for RandomValues {
    fn write(&self, elements: Range<usize>, target: &Tensor) -> Result<()> {
        let mut writer = FlatWriter::new(target);
        let mut values = Vec::new();
        let runs = self.region.runs_within(&self.shape, elements);
        for chunk in runs.flat_map(|run| chunks(run, CHUNK)) {
            let chunk = chunk.start as u64..chunk.end as u64;
            values.extend(self.init.values(&self.name, chunk, self.seed));
            if values.len() >= CHUNK {
                writer.append(&Tensor::f_from_slice(&values)?.f_to_kind(self.kind)?)?;
                values.clear();
            }
        }
        writer.append(&Tensor::f_from_slice(&values)?.f_to_kind(self.kind)?)
    }
}

/// Writes a flat tensor from its start to its end.
pub(crate) struct FlatWriter<'a> {
    target: &'a Tensor,
    written: i64,
}

impl<'a> FlatWriter<'a> {
    pub(crate) fn new(target: &'a Tensor) -> FlatWriter<'a> {
        FlatWriter { target, written: 0 }
    }

    pub(crate) fn append(&mut self, values: &Tensor) -> Result<()> {
        let length = values.numel() as i64;
        tch::no_grad(|| {
            let mut target = self.target.f_narrow(0, self.written, length)?;
            target.f_copy_(values)
        })?;
        self.written += length;
        Ok(())
    }
}

/// Splits a range into chunks of at most `length` elements.
pub(crate) fn chunks(range: Range<usize>, length: usize) -> impl Iterator<Item = Range<usize>> {
    let Range { start, end } = range;
    (start..end)
        .step_by(length)
        .map(move |start| start..(start + length).min(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_everything_once() {
        for length in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7] {
            let mut next = 0;
            for chunk in chunks(0..length, CHUNK) {
                assert_eq!(chunk.start, next);
                assert!(chunk.end > chunk.start);
                next = chunk.end;
            }
            assert_eq!(next, length);
        }
    }
}
