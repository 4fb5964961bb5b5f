//! The sequence of all samples of a run, from which every micro-batch is a range.

use std::ops::Range;
use std::sync::Arc;

use tch::Device;

use crate::{Batch, DataError, Order, Source, collate};

/// The samples of a source in the order in which a run reads them.
#[derive(Clone)]
pub struct SampleStream {
    /// The samples.
    pub source: Arc<dyn Source>,
    /// The order of a finite source.
    pub order: Order,
    /// The device of the batches.
    pub device: Device,
}

impl SampleStream {
    /// The batch of these positions. Its copy to the device is asynchronous, on the current stream.
    pub fn batch(&self, positions: Range<u64>) -> Result<Batch, DataError> {
        let indices = positions.map(|position| self.index(position));
        let indices = indices.collect::<Result<Vec<_>, _>>()?;
        let samples = indices.iter().map(|&index| self.source.sample(index));
        let batch = collate(&samples.collect::<Result<Vec<_>, _>>()?, self.device)?;
        Ok(Batch {
            samples: indices,
            ..batch
        })
    }

    /// The index of the sample at a position.
    fn index(&self, position: u64) -> Result<u64, DataError> {
        let index = self.order.locate(position, self.source.len());
        index.ok_or(DataError::OutOfRange {
            index: position,
            len: 0,
        })
    }
}
