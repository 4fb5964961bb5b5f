//! Settings that a framework's config cannot express.

use std::fmt;

/// A setting in which a written config differs from the strategy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deviation {
    /// The setting that differs.
    pub setting: Setting,
    /// Why the config cannot express it.
    pub reason: String,
    /// What the writer did instead.
    pub resolution: Resolution,
}

/// How the writer handled a setting that the config cannot express.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// The config has this value, the nearest that works.
    Approximated(String),
    /// The framework supports the setting, but outside this config: in the training script, for example.
    SetElsewhere(String),
}

/// The settings that a config may be unable to express.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Setting {
    /// The model's architecture and sizes.
    Model,
    /// The split of the data-parallel ranks into replicas and shards.
    DataParallel,
    /// When and how replicas exchange gradients or parameters.
    Synchronization,
    /// The ZeRO stage: which states are sharded.
    ZeroStage,
    /// Sequence parallelism (SP).
    SequenceParallel,
    /// Context parallelism (CP).
    ContextParallel,
    /// Pipeline parallelism (PP).
    PipelineParallel,
    /// The pipeline schedule.
    Schedule,
    /// Expert parallelism (EP).
    ExpertParallel,
    /// The sequence length, in tokens.
    SequenceLength,
    /// Activation recomputation: what the backward pass computes again.
    Recompute,
    /// Offloading of states to host memory or NVMe.
    Offload,
    /// The number types of weights, gradients and optimizer states.
    Precision,
}

impl Setting {
    /// The setting's name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Setting::Model => "the model",
            Setting::DataParallel => "data parallelism",
            Setting::Synchronization => "the synchronization of replicas",
            Setting::ZeroStage => "the ZeRO stage",
            Setting::SequenceParallel => "sequence parallelism",
            Setting::ContextParallel => "context parallelism",
            Setting::PipelineParallel => "pipeline parallelism",
            Setting::Schedule => "the pipeline schedule",
            Setting::ExpertParallel => "expert parallelism",
            Setting::SequenceLength => "the sequence length",
            Setting::Recompute => "activation recomputation",
            Setting::Offload => "offloading",
            Setting::Precision => "precision",
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Deviation {
            setting,
            reason,
            resolution,
        } = self;
        match resolution {
            Resolution::Approximated(text) => {
                write!(f, "{setting}: {reason}; approximated by: {text}")
            }
            Resolution::SetElsewhere(text) => {
                write!(f, "{setting}: {reason}; set it elsewhere: {text}")
            }
        }
    }
}
