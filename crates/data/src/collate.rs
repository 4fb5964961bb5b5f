//! Collating samples into batch tensors.

use tch::{Device, Tensor};
use trainyard_torch::device;

use crate::DataError;
use crate::source::{IMAGE_SIDE, Sample};

/// One micro-batch of a rank.
#[derive(Debug)]
pub struct Batch {
    /// Tokens as int64 `[batch, seq]`, or images as float32 `[batch, 1, 28, 28]`.
    pub inputs: Tensor,
    /// Tokens as int64 `[batch, seq]`, or labels as int64 `[batch]`.
    pub targets: Tensor,
    /// The inputs on the host, which can be read without waiting for the device.
    pub host_inputs: Tensor,
    /// Number of targets, by which the summed loss is divided.
    pub num_targets: i64,
    /// Indices of the samples in the dataset, if known.
    pub samples: Vec<u64>,
}

/// Stacks samples, which must all be of one kind and size.
pub fn collate(samples: &[Sample], device: Device) -> Result<Batch, DataError> {
    match samples.first() {
        Some(Sample::Tokens { inputs, .. }) => collate_tokens(samples, inputs.len(), device),
        Some(Sample::Image { .. }) => collate_images(samples, device),
        None => Err(DataError::Collate("the batch is empty".into())),
    }
}

fn collate_tokens(samples: &[Sample], length: usize, device: Device) -> Result<Batch, DataError> {
    let mut all_inputs = Vec::with_capacity(samples.len() * length);
    let mut all_targets = Vec::with_capacity(samples.len() * length);
    for sample in samples {
        let Sample::Tokens { inputs, targets } = sample else {
            return Err(DataError::Collate(
                "the batch mixes images and tokens".into(),
            ));
        };
        if inputs.len() != length || targets.len() != length {
            return Err(DataError::Collate(format!(
                "a sequence has {} inputs and {} targets, expected {length}",
                inputs.len(),
                targets.len()
            )));
        }
        all_inputs.extend_from_slice(inputs);
        all_targets.extend_from_slice(targets);
    }
    let shape = [samples.len() as i64, length as i64];
    let num_targets = all_targets.len() as i64;
    let inputs = host_tensor(&all_inputs, &shape, device)?;
    let targets = host_tensor(&all_targets, &shape, device)?;
    Batch::copied(inputs, targets, num_targets, device)
}

fn collate_images(samples: &[Sample], device: Device) -> Result<Batch, DataError> {
    const SIZE: usize = IMAGE_SIDE * IMAGE_SIDE;
    let mut all_pixels = Vec::with_capacity(samples.len() * SIZE);
    let mut labels = Vec::with_capacity(samples.len());
    for sample in samples {
        let Sample::Image { pixels, label } = sample else {
            return Err(DataError::Collate(
                "the batch mixes tokens and images".into(),
            ));
        };
        if pixels.len() != SIZE {
            return Err(DataError::Collate(format!(
                "an image has {} pixels, expected {SIZE}",
                pixels.len()
            )));
        }
        all_pixels.extend_from_slice(pixels);
        labels.push(*label);
    }
    let (batch, side) = (samples.len() as i64, IMAGE_SIDE as i64);
    let inputs = host_tensor(&all_pixels, &[batch, 1, side, side], device)?;
    let targets = host_tensor(&labels, &[batch], device)?;
    Batch::copied(inputs, targets, batch, device)
}

impl Batch {
    /// A batch that stays where it is, on the host or on the meta device.
    pub fn new(inputs: Tensor, targets: Tensor, num_targets: i64) -> Batch {
        Batch {
            host_inputs: inputs.shallow_clone(),
            inputs,
            targets,
            num_targets,
            samples: Vec::new(),
        }
    }

    /// Copies a batch from the host to `device` on the current stream.
    fn copied(
        inputs: Tensor,
        targets: Tensor,
        num_targets: i64,
        device: Device,
    ) -> Result<Batch, DataError> {
        if !device.is_cuda() {
            return Ok(Batch::new(inputs, targets, num_targets));
        }
        Ok(Batch {
            inputs: device::upload(inputs.shallow_clone(), device)?,
            host_inputs: inputs,
            targets: device::upload(targets, device)?,
            num_targets,
            samples: Vec::new(),
        })
    }
}

/// A tensor on the host with these values, from which `device` copies.
fn host_tensor<T: tch::kind::Element>(
    values: &[T],
    shape: &[i64],
    device: Device,
) -> Result<Tensor, DataError> {
    Ok(device::staged(values, device)?.f_view(shape)?)
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::{Source, SyntheticImages, SyntheticTokens};

    fn samples(source: &dyn Source, number: u64) -> Vec<Sample> {
        (0..number).map(|i| source.sample(i).unwrap()).collect()
    }

    #[test]
    fn tokens_stack_in_order() {
        let source = SyntheticTokens::new(8, 1024, 1).unwrap();
        let batch = collate(&samples(&source, 3), Device::Cpu).unwrap();
        assert_eq!(batch.inputs.size(), [3, 8]);
        assert_eq!((batch.inputs.kind(), batch.num_targets), (Kind::Int64, 24));
        let row = Vec::<i64>::try_from(batch.inputs.get(0)).unwrap();
        assert_eq!(row, [828, 248, 223, 98, 497, 444, 179, 902]);
        assert_eq!(batch.targets.int64_value(&[0, 7]), 421);
    }

    #[test]
    fn images_stack_with_their_labels() {
        let batch = collate(&samples(&SyntheticImages::new(7), 2), Device::Cpu).unwrap();
        assert_eq!(batch.inputs.size(), [2, 1, 28, 28]);
        assert_eq!(
            (batch.inputs.kind(), batch.targets.kind()),
            (Kind::Float, Kind::Int64)
        );
        assert_eq!((batch.targets.size(), batch.num_targets), (vec![2], 2));
    }

    #[test]
    fn mismatched_samples_are_rejected() {
        let tokens = samples(&SyntheticTokens::new(8, 16, 1).unwrap(), 1);
        let longer = samples(&SyntheticTokens::new(9, 16, 1).unwrap(), 1);
        let images = samples(&SyntheticImages::new(1), 1);
        let error = |samples: &[Sample]| collate(samples, Device::Cpu).unwrap_err().to_string();
        assert!(error(&[]).ends_with("the batch is empty"));
        assert!(error(&[tokens.clone(), longer].concat()).contains("9 inputs"));
        assert!(error(&[tokens.clone(), images.clone()].concat()).contains("images and tokens"));
        assert!(error(&[images, tokens].concat()).contains("tokens and images"));
    }
}
