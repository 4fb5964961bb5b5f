//! What a framework cannot say.

use std::fmt;

/// One choice that a framework's text does not carry as it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Which choice.
    pub what: Choice,
    /// Why the framework cannot say it.
    pub why: String,
    /// What becomes of it.
    pub instead: Instead,
}

/// What becomes of a choice that cannot be said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Instead {
    /// The text says this, the nearest thing that works.
    Written(String),
    /// The framework can do it, but is told so in another place than this text.
    Elsewhere(String),
}

/// The choices that may be lost.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// The model's shape.
    Model,
    /// How data-parallel ranks are divided into copies and shards.
    DataParallel,
    /// What is sharded.
    ZeroStage,
    /// Ranks that share positions between matrices.
    SequenceParallel,
    /// Ranks that share a sequence.
    ContextParallel,
    /// Ranks that share the layers.
    PipelineParallel,
    /// The order of a pipeline's work.
    Schedule,
    /// Ranks that share the experts.
    ExpertParallel,
    /// Tokens of a sample.
    SequenceLength,
    /// What backward computes again.
    Recompute,
    /// Where states lie.
    Offload,
    /// The types things are held in.
    Precision,
}

impl Choice {
    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Choice::Model => "the model",
            Choice::DataParallel => "copies and shards",
            Choice::ZeroStage => "the ZeRO stage",
            Choice::SequenceParallel => "sequence parallelism",
            Choice::ContextParallel => "context parallelism",
            Choice::PipelineParallel => "the pipeline",
            Choice::Schedule => "the pipeline's schedule",
            Choice::ExpertParallel => "expert parallelism",
            Choice::SequenceLength => "the sequence's length",
            Choice::Recompute => "recomputation",
            Choice::Offload => "offloading",
            Choice::Precision => "number types",
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Loss { what, why, instead } = self;
        match instead {
            Instead::Written(text) => write!(f, "{what}: {why}; written instead: {text}"),
            Instead::Elsewhere(text) => write!(f, "{what}: {why}; say it elsewhere: {text}"),
        }
    }
}
