//! The shapes and types of one sample, without those of the batch.

use tch::Kind;
use trainyard_config::ModelSpec;
use trainyard_data::{IMAGE_SIDE, Values};

use crate::build::{self, Phase};
use crate::error::{Result, TrainError};
use crate::train_spec::TrainSpec;

/// What a model reads, in the type in which it computes, and what its loss compares with.
pub(crate) struct SampleLayout {
    pub inputs: (Vec<usize>, Kind),
    pub targets: (Vec<usize>, Kind),
}

impl SampleLayout {
    /// The layout that the model requires; for a registered model, that of the first sample of its dataset.
    pub(crate) fn of(spec: &TrainSpec) -> Result<SampleLayout> {
        let compute_kind = build::kind(spec.training.compute_dtype());
        Ok(match spec.model.resolve()? {
            ModelSpec::Decoder(_) => {
                let tokens = (vec![spec.training.seq_len], Kind::Int64);
                SampleLayout {
                    inputs: tokens.clone(),
                    targets: tokens,
                }
            }
            ModelSpec::Cnn | ModelSpec::Vit(_) => SampleLayout {
                inputs: (vec![1, IMAGE_SIDE, IMAGE_SIDE], compute_kind),
                targets: (Vec::new(), Kind::Int64),
            },
            ModelSpec::Custom(_) => {
                let sample = build::source(spec, Phase::Training)?.sample(0)?;
                SampleLayout {
                    inputs: match sample.inputs.values {
                        Values::Int(_) => (sample.inputs.shape, Kind::Int64),
                        Values::Float(_) => (sample.inputs.shape, compute_kind),
                    },
                    targets: (sample.targets.shape.clone(), sample.targets.kind()),
                }
            }
        })
    }

    /// Context parallelism divides the positions of inputs and targets, which must be their first dimension.
    pub(crate) fn check_positions(&self, num_ranks: usize) -> Result<()> {
        let (inputs, targets) = (&self.inputs.0, &self.targets.0);
        if num_ranks == 1 || !targets.is_empty() && inputs.first() == targets.first() {
            return Ok(());
        }
        Err(TrainError::Dataset(format!(
            "context parallelism divides the positions of a sequence, but samples have inputs of shape {inputs:?} and \
             targets of shape {targets:?}: use parallelism.context_parallel_degree = 1"
        )))
    }

    /// Targets per sample.
    pub(crate) fn num_targets(&self) -> usize {
        self.targets.0.iter().product()
    }
}
