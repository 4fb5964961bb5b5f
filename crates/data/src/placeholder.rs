//! Samples for ranks that need their shapes only, such as the inner stages of a pipeline.

use std::sync::Arc;

use crate::DataError;
use crate::source::{Sample, Source};

/// A source that reads nothing: it returns the first sample of another one for every index.
pub struct Placeholder {
    sample: Sample,
    len: Option<u64>,
}

impl Placeholder {
    /// Reads the first sample of `source`.
    pub fn new(source: &Arc<dyn Source>) -> Result<Placeholder, DataError> {
        Ok(Placeholder {
            sample: source.sample(0)?,
            len: source.len(),
        })
    }
}

impl Source for Placeholder {
    fn len(&self) -> Option<u64> {
        self.len
    }

    fn sample(&self, _: u64) -> Result<Sample, DataError> {
        Ok(self.sample.clone())
    }
}
