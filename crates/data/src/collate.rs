//! Collating samples into batch tensors.

use tch::{Device, Tensor};
use trainyard_torch::device;

use crate::DataError;
use crate::source::{Array, Sample, Values};

/// One micro-batch of a rank.
#[derive(Debug)]
pub struct Batch {
    /// Tokens as int64 `[batch, seq]`, images as float32 `[batch, 1, 28, 28]`, or what the dataset has.
    pub inputs: Tensor,
    /// Tokens as int64 `[batch, seq]`, labels as int64 `[batch]`, or what the dataset has.
    pub targets: Tensor,
    /// The inputs on the host, which can be read without waiting for the device.
    pub host_inputs: Tensor,
    /// Number of targets, by which the summed loss is divided.
    pub num_targets: i64,
    /// Indices of the samples in the dataset, if known.
    pub samples: Vec<u64>,
}

/// Stacks samples, which must all have the same shapes and types.
pub fn collate(samples: &[Sample], device: Device) -> Result<Batch, DataError> {
    let inputs = stack("inputs", samples.iter().map(|s| &s.inputs), device)?;
    let targets = stack("targets", samples.iter().map(|s| &s.targets), device)?;
    let num_targets: usize = samples.iter().map(|s| s.targets.num_targets()).sum();
    Batch::copied(inputs, targets, num_targets as i64, device)
}

/// Stacks arrays into a tensor on the host, from which `device` copies.
fn stack<'a>(
    what: &str,
    arrays: impl ExactSizeIterator<Item = &'a Array> + Clone,
    device: Device,
) -> Result<Tensor, DataError> {
    let Some(first) = arrays.clone().next() else {
        return Err(DataError::Collate("the batch is empty".into()));
    };
    let mut shape = vec![arrays.len() as i64];
    shape.extend(first.shape.iter().map(|&size| size as i64));
    let capacity = arrays.len() * first.numel();
    let (mut ints, mut floats) = (Vec::new(), Vec::new());
    match first.values {
        Values::Int(_) => ints.reserve_exact(capacity),
        Values::Float(_) => floats.reserve_exact(capacity),
    }
    for array in arrays {
        check_same(what, first, array)?;
        match &array.values {
            Values::Int(values) => ints.extend_from_slice(values),
            Values::Float(values) => floats.extend_from_slice(values),
        }
    }
    match first.values {
        Values::Int(_) => host_tensor(&ints, &shape, device),
        Values::Float(_) => host_tensor(&floats, &shape, device),
    }
}

fn check_same(what: &str, first: &Array, array: &Array) -> Result<(), DataError> {
    let num_values = match &array.values {
        Values::Int(values) => values.len(),
        Values::Float(values) => values.len(),
    };
    if num_values != array.numel() {
        return Err(DataError::Collate(format!(
            "a sample has {what} of shape {:?}, but {num_values} values",
            array.shape
        )));
    }
    if (&array.shape, array.kind()) == (&first.shape, first.kind()) {
        return Ok(());
    }
    let describe = |array: &Array| format!("{:?}{:?}", array.kind(), array.shape);
    Err(DataError::Collate(format!(
        "the {what} of a batch must be alike, but are {} and {}",
        describe(first),
        describe(array)
    )))
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
        assert!(error(&[tokens.clone(), longer].concat()).contains("Int64[8] and Int64[9]"));
        assert!(
            error(&[tokens.clone(), images.clone()].concat())
                .contains("Int64[8] and Float[1, 28, 28]")
        );
        let mut short = images;
        short[0].inputs.shape = vec![2, 2];
        assert!(error(&short).contains("but 784 values"));
    }
}
