//! `[parallelism]`: the parallel strategy.

use std::path::PathBuf;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::within;
use trainyard_schedule::{ScheduleError, ScheduleKind};

use crate::ConfigError;

/// Compression of gradients before their reduction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GradientCompression {
    /// No compression.
    #[default]
    #[serde(rename = "none")]
    None,
    /// All-reduced in `bfloat16`.
    #[serde(rename = "bf16")]
    Bf16,
    /// All-reduced in `float16`.
    #[serde(rename = "fp16")]
    Fp16,
    /// Sent as 8-bit integers with a scale for every 256 gradients, and added in `float32`.
    #[serde(rename = "int8")]
    Int8,
    /// The same with 8-bit floating-point numbers (e4m3).
    #[serde(rename = "fp8")]
    Fp8,
    /// Only the largest of every 4096 gradients are sent; the others are added to the next gradients.
    #[serde(rename = "top_k")]
    TopK,
    /// A random choice of gradients is sent; the others are added to the next gradients.
    #[serde(rename = "random_k")]
    RandomK,
    /// The gradient of a matrix is sent as a product of two thin matrices, and what that loses is added to the next
    /// gradient.
    #[serde(rename = "power_sgd")]
    PowerSgd,
}

impl GradientCompression {
    /// Its name in a config.
    pub fn name(self) -> &'static str {
        match self {
            GradientCompression::None => "none",
            GradientCompression::Bf16 => "bf16",
            GradientCompression::Fp16 => "fp16",
            GradientCompression::Int8 => "int8",
            GradientCompression::Fp8 => "fp8",
            GradientCompression::TopK => "top_k",
            GradientCompression::RandomK => "random_k",
            GradientCompression::PowerSgd => "power_sgd",
        }
    }

    /// The largest difference of a reduced gradient from the exact sum, relative to the largest gradient of its bucket. What is
    /// kept for the next step counts as sent.
    pub fn max_difference(self) -> f64 {
        match self {
            GradientCompression::Bf16 => 2e-2,
            GradientCompression::Fp16 => 2e-3,
            GradientCompression::Int8 => 4e-2,
            GradientCompression::Fp8 => 0.3,
            // Only rounding: what these do not send, they keep.
            GradientCompression::None
            | GradientCompression::TopK
            | GradientCompression::RandomK
            | GradientCompression::PowerSgd => 1e-5,
        }
    }

    /// Whether neighboring gradients are encoded together, so that what becomes of one depends on the others.
    pub fn encodes_blocks(self) -> bool {
        use GradientCompression::{Fp8, Int8, TopK};
        matches!(self, Int8 | Fp8 | TopK)
    }

    /// Whether what is not sent is added to the next gradients, so that every rank keeps errors of all gradients.
    pub fn keeps_errors(self) -> bool {
        use GradientCompression::{PowerSgd, RandomK, TopK};
        matches!(self, TopK | RandomK | PowerSgd)
    }
}

/// Compression of parameters when they are unsharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ParameterCompression {
    /// None.
    #[default]
    #[serde(rename = "none")]
    None,
    /// Sent as 8-bit integers with a scale for every 256 parameters.
    #[serde(rename = "int8")]
    Int8,
    /// The same with 8-bit floating-point numbers (e4m3).
    #[serde(rename = "fp8")]
    Fp8,
}

/// Whether parameters are resharded after forward and unsharded again for backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReshardAfterForward {
    /// All but those of the last unit, which backward needs first.
    #[default]
    #[serde(rename = "default")]
    Default,
    /// All.
    #[serde(rename = "always")]
    Always,
    /// None.
    #[serde(rename = "never")]
    Never,
}

/// Where unused parameters and optimizer states are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Offload {
    /// In device memory: no offload.
    #[default]
    #[serde(rename = "none")]
    None,
    /// In the in-memory file system.
    #[serde(rename = "cpu")]
    Cpu,
    /// In files.
    #[serde(rename = "nvme")]
    Nvme,
}

/// When pipeline stages reduce their gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PipelineReduce {
    /// With the last backward of each stage; until then a stage holds full gradients.
    #[default]
    #[serde(rename = "once")]
    Once,
    /// With every backward: one reduction per micro-batch, and no full gradients (stages 2 and 3).
    #[serde(rename = "each")]
    Each,
}

/// Which states are offloaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OffloadStates {
    /// Parameters, master weights and moments; stage 3 only.
    #[default]
    #[serde(rename = "all")]
    All,
    /// Master weights and moments.
    #[serde(rename = "optimizer")]
    Optimizer,
}

/// The method of context parallelism.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContextMethod {
    /// Ring attention: keys and values travel around a ring.
    #[default]
    #[serde(rename = "ring")]
    Ring,
    /// Ulysses: an all-to-all exchanges positions for heads.
    #[serde(rename = "ulysses")]
    Ulysses,
}

/// `[parallelism]`. A degree of -1 takes all remaining ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelismSection {
    /// Whether the planner chooses all of these for the cluster `job.cluster`; short form: `parallelism = "auto"`.
    pub auto: bool,
    /// Replicas that take optimizer steps of their own, as `[local_updates]` says.
    pub data_parallel_outer_degree: i64,
    /// Data-parallel replicas of the model.
    pub data_parallel_replicate_degree: i64,
    /// Ranks over which each replica is sharded.
    pub data_parallel_shard_degree: i64,
    /// What those ranks shard: 1 optimizer states, 2 also gradients, 3 also parameters; 0 nothing, so that expert
    /// parallelism can use replicas.
    pub zero_stage: usize,
    /// Whether parameters are resharded after forward; stage 3 only. Pipeline stages stay unsharded over micro-batches: two
    /// of a rank at a time, all with `never`, none with `always`.
    pub fsdp_reshard_after_forward: ReshardAfterForward,
    /// The number of units that are unsharded ahead of their use; stage 3 only.
    pub fsdp_prefetch: usize,
    /// Merges the flat parameters of consecutive units up to this number of bytes of gradients, for fewer and larger
    /// collectives; one flat parameter per unit if absent.
    pub reduce_bucket_size: Option<u64>,
    /// Where unused parameters and optimizer states are stored.
    pub offload: Offload,
    /// Whether `zero_stage` shards the states of experts too, over the ranks that hold the same experts.
    pub shard_experts: bool,
    /// Which states are offloaded.
    pub offload_states: OffloadStates,
    /// The directory of offload files, on a fast disk, for `nvme`.
    pub offload_folder: Option<PathBuf>,
    /// The tensor-parallel degree.
    pub tensor_parallel_degree: i64,
    /// Whether tensor-parallel ranks also split the activations between matrix products by position, which saves memory.
    pub enable_sequence_parallel: bool,
    /// Whether backward gathers those activations again: least memory, more bytes.
    pub sequence_parallel_regather: bool,
    /// Whether tensor-parallel communication overlaps with matrix products.
    pub enable_async_tensor_parallel: bool,
    /// The pipeline-parallel degree.
    pub pipeline_parallel_degree: i64,
    /// The schedule: a name as in `trainyard schedule --kind`, or PyTorch's.
    pub pipeline_parallel_schedule: String,
    /// A file with another schedule, in PyTorch's CSV format.
    pub pipeline_parallel_schedule_csv: Option<PathBuf>,
    /// Stages per rank, for schedules that allow a choice.
    pub pipeline_parallel_stages_per_rank: usize,
    /// The first blocks of the second and later stages, as in `layers.2,layers.4`; balanced by cost if absent.
    pub pipeline_parallel_split_points: Option<String>,
    /// When stages reduce sharded gradients.
    pub pipeline_parallel_reduce: PipelineReduce,
    /// The context-parallel degree.
    pub context_parallel_degree: i64,
    /// The method of context parallelism.
    pub context_parallel_method: ContextMethod,
    /// The expert-parallel degree.
    pub expert_parallel_degree: i64,
    /// How many consecutive expert-parallel ranks are on one node; 0 takes it from the launcher. If they are on several
    /// nodes, the all-to-all is hierarchical.
    pub expert_parallel_local_degree: usize,
    /// Bucket size in MiB.
    pub bucket_cap_mb: f64,
    /// Size of the first bucket in MiB, small so that reduction starts early.
    pub first_bucket_mb: f64,
    /// Whether gradient reduction overlaps with backward.
    pub overlap: bool,
    /// Compression of gradients before their reduction.
    pub gradient_compression: GradientCompression,
    /// The share of gradients that `top_k` and `random_k` send.
    pub gradient_compression_ratio: f64,
    /// The rank of the matrices that `power_sgd` sends.
    pub power_sgd_rank: usize,
    /// The step from which `power_sgd` compresses. Earlier gradients change too fast for its errors.
    pub power_sgd_start_step: u64,
    /// Compression of parameters when they are unsharded; stage 3 only.
    pub parameter_compression: ParameterCompression,
    /// Whether states are sharded over the replicas too, while the ranks of each replica share a second copy of the
    /// parameters, from which backward unshards them; stage 3 only.
    pub fsdp_secondary_shards: bool,
    /// Whether a step may leave parameters without a gradient.
    pub find_unused_parameters: bool,
}

impl Default for ParallelismSection {
    fn default() -> Self {
        ParallelismSection {
            auto: false,
            data_parallel_outer_degree: 1,
            data_parallel_replicate_degree: -1,
            data_parallel_shard_degree: 1,
            zero_stage: 3,
            fsdp_reshard_after_forward: ReshardAfterForward::Default,
            fsdp_prefetch: 1,
            reduce_bucket_size: None,
            shard_experts: true,
            offload: Offload::None,
            offload_states: OffloadStates::All,
            offload_folder: None,
            tensor_parallel_degree: 1,
            enable_sequence_parallel: true,
            sequence_parallel_regather: false,
            enable_async_tensor_parallel: true,
            pipeline_parallel_degree: 1,
            pipeline_parallel_schedule: "1F1B".to_owned(),
            pipeline_parallel_schedule_csv: None,
            pipeline_parallel_stages_per_rank: 2,
            pipeline_parallel_split_points: None,
            pipeline_parallel_reduce: PipelineReduce::Once,
            context_parallel_degree: 1,
            context_parallel_method: ContextMethod::Ring,
            expert_parallel_degree: 1,
            expert_parallel_local_degree: 0,
            bucket_cap_mb: 25.0,
            first_bucket_mb: 1.0,
            overlap: true,
            gradient_compression: GradientCompression::None,
            gradient_compression_ratio: 0.01,
            power_sgd_rank: 1,
            power_sgd_start_step: 1000,
            parameter_compression: ParameterCompression::None,
            fsdp_secondary_shards: false,
            find_unused_parameters: false,
        }
    }
}

impl ParallelismSection {
    /// The pipeline schedule.
    pub fn schedule_kind(&self) -> Result<ScheduleKind, ConfigError> {
        let name = &self.pipeline_parallel_schedule;
        name.parse().map_err(|error: ScheduleError| {
            ConfigError::contradiction(
                format!("parallelism.pipeline_parallel_schedule = {name:?}"),
                error.to_string(),
            )
        })
    }

    /// The first blocks of the second and later stages, if given.
    pub fn split_points(&self) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(text) = &self.pipeline_parallel_split_points else {
            return Ok(None);
        };
        let rejected = || {
            ConfigError::contradiction(
                format!(
                    "parallelism.pipeline_parallel_split_points = {text:?} is not a list of blocks"
                ),
                "write increasing block numbers, as in \"layers.2,layers.4\"",
            )
        };
        let block = |name: &str| name.trim().strip_prefix("layers.")?.parse::<usize>().ok();
        let blocks: Option<Vec<usize>> = text.split(',').map(block).collect();
        let blocks = blocks.ok_or_else(rejected)?;
        if blocks.windows(2).all(|pair| pair[0] < pair[1]) {
            Ok(Some(blocks))
        } else {
            Err(rejected())
        }
    }

    /// Validates what only sharded parameters can have.
    fn check_sharded_parameters(&self) -> Result<(), ConfigError> {
        let key = match (self.parameter_compression, self.fsdp_secondary_shards) {
            (ParameterCompression::None, false) => return Ok(()),
            (_, true) => "parallelism.fsdp_secondary_shards",
            (_, false) => "parallelism.parameter_compression",
        };
        if self.zero_stage != 3 {
            return Err(ConfigError::contradiction(
                format!(
                    "{key} is for sharded parameters, but parallelism.zero_stage = {}",
                    self.zero_stage
                ),
                "use parallelism.zero_stage = 3",
            ));
        }
        if self.fsdp_secondary_shards && self.offload != Offload::None {
            return Err(ConfigError::contradiction(
                "parallelism.fsdp_secondary_shards keeps a second copy of what parallelism.offload takes out of memory",
                "remove one of them",
            ));
        }
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        self.schedule_kind()?;
        self.check_sharded_parameters()?;
        within(
            "parallelism.power_sgd_rank",
            self.power_sgd_rank as f64,
            1.0,
            f64::INFINITY,
        )?;
        self.split_points()?;
        let chunks = self.pipeline_parallel_stages_per_rank as f64;
        within(
            "parallelism.pipeline_parallel_stages_per_rank",
            chunks,
            1.0,
            64.0,
        )?;
        // A bucket holds at least one parameter, so any positive size is valid.
        let smallest = 1.0 / 1024.0;
        for (key, value) in [
            ("parallelism.bucket_cap_mb", self.bucket_cap_mb),
            ("parallelism.first_bucket_mb", self.first_bucket_mb),
        ] {
            within(key, value, smallest, 1024.0 * 1024.0)?;
        }
        within("parallelism.zero_stage", self.zero_stage as f64, 0.0, 3.0)?;
        self.check_offload()?;
        Ok(())
    }

    fn check_offloaded_stage(&self) -> Result<(), ConfigError> {
        let fix = match (self.offload_states, self.zero_stage) {
            (OffloadStates::All, 3) | (OffloadStates::Optimizer, 1..=3) => return Ok(()),
            (OffloadStates::All, 1 | 2) => {
                "use parallelism.zero_stage = 3, or parallelism.offload_states = \"optimizer\""
            }
            _ => "use parallelism.zero_stage = 3",
        };
        Err(ConfigError::contradiction(
            format!(
                "parallelism.offload needs states that are sharded, but parallelism.zero_stage = {}",
                self.zero_stage
            ),
            fix,
        ))
    }

    fn check_offload(&self) -> Result<(), ConfigError> {
        match (self.offload, &self.offload_folder) {
            (Offload::Nvme, None) => Err(ConfigError::contradiction(
                "parallelism.offload = \"nvme\", but parallelism.offload_folder is absent",
                "set parallelism.offload_folder to a folder on a fast disk",
            )),
            (Offload::None | Offload::Cpu, Some(folder)) => Err(ConfigError::contradiction(
                format!(
                    "parallelism.offload_folder = {folder:?} has a meaning only with \
                     parallelism.offload = \"nvme\""
                ),
                "use parallelism.offload = \"nvme\", or remove the folder",
            )),
            (Offload::Nvme | Offload::Cpu, _) => self.check_offloaded_stage(),
            (Offload::None, None) => Ok(()),
        }
    }
}
