//! The dataset interface: random access to samples by index.

use crate::DataError;

/// Width and height of images.
pub const IMAGE_SIDE: usize = 28;

/// One sample of a dataset.
#[derive(Clone, Debug, PartialEq)]
pub enum Sample {
    /// A token sequence and, for each token, the next one.
    Tokens {
        /// Input tokens of the model.
        inputs: Vec<i64>,
        /// The next token of each input.
        targets: Vec<i64>,
    },
    /// A grayscale image of [`IMAGE_SIDE`] × [`IMAGE_SIDE`] pixels with a label.
    Image {
        /// Pixel values from 0 to 1, row by row.
        pixels: Vec<f32>,
        /// The class of the image.
        label: i64,
    },
}

impl Sample {
    /// Splits a sequence into inputs and targets, which are shifted by one.
    pub(crate) fn from_sequence(sequence: &[i64]) -> Sample {
        let inputs = &sequence[..sequence.len().saturating_sub(1)];
        let targets = sequence.get(1..).unwrap_or_default();
        Sample::Tokens {
            inputs: inputs.to_vec(),
            targets: targets.to_vec(),
        }
    }
}

/// A map-style dataset: any thread can read any sample.
pub trait Source: Send + Sync {
    /// The number of samples; `None` for an endless source.
    fn len(&self) -> Option<u64>;

    /// The sample at `index`, counted from 0.
    fn sample(&self, index: u64) -> Result<Sample, DataError>;

    /// Whether the source has no samples.
    fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }
}

/// Returns an error if the index is out of range.
pub(crate) fn check_index(index: u64, len: u64) -> Result<(), DataError> {
    if index < len {
        Ok(())
    } else {
        Err(DataError::OutOfRange { index, len })
    }
}
