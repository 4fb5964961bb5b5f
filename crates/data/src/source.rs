//! What a dataset is: sample number i.

use crate::DataError;

/// Width and height of the images that models here read.
pub const IMAGE_SIDE: usize = 28;

/// One sample, in plain Rust.
#[derive(Clone, Debug, PartialEq)]
pub enum Sample {
    /// A sequence, and for each of its tokens the one that follows.
    Tokens {
        /// What the model reads.
        inputs: Vec<i64>,
        /// What it should say; as many as inputs.
        targets: Vec<i64>,
    },
    /// A grey image of [`IMAGE_SIDE`] squared pixels, and what it shows.
    Image {
        /// Row by row, from 0 to 1.
        pixels: Vec<f32>,
        /// The class.
        label: i64,
    },
}

impl Sample {
    /// Inputs and targets out of a sequence: the targets are one ahead.
    pub(crate) fn from_sequence(sequence: &[i64]) -> Sample {
        let inputs = &sequence[..sequence.len().saturating_sub(1)];
        let targets = sequence.get(1..).unwrap_or_default();
        Sample::Tokens {
            inputs: inputs.to_vec(),
            targets: targets.to_vec(),
        }
    }
}

/// A dataset that can be asked for any sample, from any thread.
pub trait Source: Send + Sync {
    /// How many samples there are; `None` if they never end.
    fn len(&self) -> Option<u64>;

    /// Sample number `index`, counted from 0.
    fn sample(&self, index: u64) -> Result<Sample, DataError>;

    /// Whether there is no sample at all.
    fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }
}

/// Refuses an index beyond the end.
pub(crate) fn check_index(index: u64, len: u64) -> Result<(), DataError> {
    match index < len {
        true => Ok(()),
        false => Err(DataError::OutOfRange { index, len }),
    }
}
