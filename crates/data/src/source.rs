//! The dataset interface: random access to samples by index.

use trainyard_torch::IGNORE_INDEX;

use crate::DataError;

/// Width and height of images.
pub const IMAGE_SIDE: usize = 28;

/// The numbers of an array.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Int64, such as tokens and labels.
    Int(Vec<i64>),
    /// Float32, such as pixels.
    Float(Vec<f32>),
}

/// Numbers with a shape, which become a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// The numbers, the last dimension fastest.
    pub values: Values,
    /// The size of every dimension; empty for a single number.
    pub shape: Vec<usize>,
}

impl Array {
    /// A list of integers.
    pub fn ints(values: Vec<i64>) -> Array {
        Array {
            shape: vec![values.len()],
            values: Values::Int(values),
        }
    }

    /// A list of floats.
    pub fn floats(values: Vec<f32>) -> Array {
        Array {
            shape: vec![values.len()],
            values: Values::Float(values),
        }
    }

    /// A single integer, such as a label.
    pub fn int(value: i64) -> Array {
        Array::ints(vec![value]).reshaped(&[])
    }

    /// The same numbers in another shape.
    pub fn reshaped(mut self, shape: &[usize]) -> Array {
        self.shape = shape.to_vec();
        self
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// The elements that are not [`IGNORE_INDEX`].
    pub(crate) fn num_targets(&self) -> usize {
        match &self.values {
            Values::Int(values) => values
                .iter()
                .filter(|value| **value != IGNORE_INDEX)
                .count(),
            Values::Float(values) => values.len(),
        }
    }

    /// The element type of its tensor.
    pub fn kind(&self) -> tch::Kind {
        match self.values {
            Values::Int(_) => tch::Kind::Int64,
            Values::Float(_) => tch::Kind::Float,
        }
    }
}

/// One sample of a dataset: what the model reads, and what its loss compares the output with.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Inputs of the model, without the dimension of the batch.
    pub inputs: Array,
    /// Targets of the loss. Each of its elements but [`IGNORE_INDEX`] counts as a target: the loss is their mean.
    pub targets: Array,
}

impl Sample {
    /// A sequence of tokens: each is the input for which the next one is the target.
    pub fn from_sequence(sequence: &[i64]) -> Sample {
        let inputs = &sequence[..sequence.len().saturating_sub(1)];
        let targets = sequence.get(1..).unwrap_or_default();
        Sample {
            inputs: Array::ints(inputs.to_vec()),
            targets: Array::ints(targets.to_vec()),
        }
    }

    /// A grayscale image of [`IMAGE_SIDE`] × [`IMAGE_SIDE`] pixels, row by row, and its class.
    pub fn image(pixels: Vec<f32>, label: i64) -> Sample {
        Sample {
            inputs: Array::floats(pixels).reshaped(&[1, IMAGE_SIDE, IMAGE_SIDE]),
            targets: Array::int(label),
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
