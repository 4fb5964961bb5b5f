//! Errors of strategies.

use trainyard_nn::NnError;
use trainyard_optim::OptimError;
use trainyard_torch::TorchError;

use crate::offload::OffloadError;

/// Result type of this crate.
pub type Result<T, E = ParallelError> = std::result::Result<T, E>;

/// An error of a strategy, or of the model, optimizer or process group that it uses.
#[derive(Debug, thiserror::Error)]
pub enum ParallelError {
    /// No axis of the mesh shards the states of the model.
    #[error(
        "FullyShard shards nothing: mesh {mesh} has one rank along dp_shard and cp; join the world with \
         `init_along(Axis::DpShard)`, or use Ddp"
    )]
    ShardsNothing {
        /// The mesh.
        mesh: String,
    },
    /// Some parameters have no gradient, because the loss does not depend on them.
    #[error(
        "parameters without a gradient: {}; every parameter must contribute to the loss on every rank, or set \
         parallelism.find_unused_parameters = true",
        names.join(", ")
    )]
    UnusedParameters {
        /// Names of the parameters.
        names: Vec<String>,
    },
    /// Some parameters belong to no unit, so the strategy does not know when to gather them.
    #[error(
        "parameters outside of the model's units: {}; a sharded model needs every trainable parameter in one of \
         its units",
        names.join(", ")
    )]
    OutsideUnits {
        /// Names of the parameters.
        names: Vec<String>,
    },
    /// The model has no trainable parameters.
    #[error("the model has no trainable parameters to shard; use it without a strategy")]
    NothingToShard,
    /// The batch size is not divisible by the number of replicas.
    #[error("a batch of {rows} samples cannot be divided evenly over {num_replicas} replicas")]
    Indivisible {
        /// Samples in the batch.
        rows: i64,
        /// Number of replicas.
        num_replicas: usize,
    },
    /// A batch cannot be divided into micro-batches of equal size.
    #[error(
        "a batch of {num_samples} samples cannot be divided evenly into {chunks} micro-batches"
    )]
    IndivisibleChunks {
        /// Samples in the batch.
        num_samples: i64,
        /// Micro-batches of a step.
        chunks: i64,
    },
    /// A micro-batch of another size than the one that a pipeline was built for.
    #[error(
        "a micro-batch of {num_samples} samples, but the pipeline was built for micro-batches of {expected}: use batches of equal \
         size"
    )]
    OtherMicrobatch {
        /// Samples of the micro-batch.
        num_samples: i64,
        /// Samples of the micro-batch that the pipeline was built with.
        expected: i64,
    },
    /// A unit that `pipeline` cannot place on one rank.
    #[error(
        "unit {unit} {what}: `pipeline` needs units of their own; build the stages with `Pipeline::new`"
    )]
    NotPipelined {
        /// The unit.
        unit: String,
        /// What it has.
        what: &'static str,
    },
    /// The schedule cannot be built.
    #[error(transparent)]
    Schedule(#[from] trainyard_schedule::ScheduleError),
    /// The model has fewer units than there are stages.
    #[error(transparent)]
    TooManyStages(#[from] trainyard_cost::TooManyStages),
    /// Ranks of a join have not had a single batch that they could repeat.
    #[error(
        "{number} of the ranks of group {group} have no batches at all, so they cannot take part in the steps of the others: give \
         every rank at least one batch"
    )]
    NoBatches {
        /// How many ranks have none.
        number: u64,
        /// The name of the group.
        group: String,
    },
    /// The thread of a replica failed.
    #[error("replica {index} failed: {reason}")]
    Replica {
        /// Index of the replica.
        index: usize,
        /// The reason.
        reason: String,
    },
    /// An error of offloading.
    #[error(transparent)]
    Offload(#[from] OffloadError),
    /// The optimizer failed.
    #[error("the optimizer failed: {0}")]
    Optimizer(#[from] OptimError),
    /// Offload of parameters without stage 3.
    #[error(
        "offload of parameters needs sharded parameters; set zero_stage = 3, or offload_states = \"optimizer\""
    )]
    OffloadNeedsStage3,
    /// The mean of gradients of experts that are on different ranks.
    #[error(
        "gradients of experts on different ranks have no mean over ranks: an expert gets those of tokens of all ranks; divide \
         the loss by the global number of targets and use ReduceOp::Sum"
    )]
    MeanOfExperts,
    /// A visitor of states ended the visit.
    #[error("the visit of offloaded states was interrupted by its caller")]
    Interrupted,
    /// The stages or the group do not match the schedule.
    #[error(
        "the schedule has {num_ranks} ranks and {num_stages} stages on this rank, but the group has {group_size} \
         ranks and {given} stages were given"
    )]
    StageMismatch {
        /// Number of ranks of the schedule.
        num_ranks: usize,
        /// Number of ranks of the group.
        group_size: usize,
        /// Number of stages of this rank in the schedule.
        num_stages: usize,
        /// Number of stages given.
        given: usize,
    },
    /// A task of a stage that is on another rank, or whose input is missing.
    #[error(
        "stage {stage} has no such task or input on this rank; check the schedule with Schedule::check"
    )]
    UnexpectedTask {
        /// The stage.
        stage: usize,
    },
    /// The number of micro-batches differs from that of the schedule.
    #[error("the schedule has {expected} micro-batches, but the step has {given}")]
    Microbatches {
        /// Number of micro-batches of the schedule.
        expected: usize,
        /// Number of micro-batches of the step.
        given: usize,
    },
    /// A single pass was requested of a pipeline.
    #[error("a pipeline cannot run single passes, because micro-batches overlap; call run_step")]
    FullStepsOnly,
    /// An error of the model.
    #[error(transparent)]
    Nn(#[from] NnError),
    /// An error of libtorch or of a collective.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl From<tch::TchError> for ParallelError {
    fn from(e: tch::TchError) -> Self {
        ParallelError::Torch(e.into())
    }
}
