//! `[parallelism]`: how the work is split over ranks.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::within;
use trainyard_schedule::{Kind, ScheduleError};

use crate::ConfigError;

/// What is done to gradients before they travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GradientCompression {
    /// Sent as they are.
    #[default]
    #[serde(rename = "none")]
    None,
    /// Rounded to `bfloat16` for the journey.
    #[serde(rename = "bf16")]
    Bf16,
}

/// Whether parameters sharded over ranks go after forward and are gathered again for backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReshardAfterForward {
    /// All but the last unit's, which backward needs at once.
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

/// Where parameters and optimiser states are kept while nobody computes with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Offload {
    /// With the layers that compute with them.
    #[default]
    #[serde(rename = "none")]
    None,
    /// In main memory, outside of what tensors are allocated from.
    #[serde(rename = "cpu")]
    Cpu,
    /// In files.
    #[serde(rename = "nvme")]
    Nvme,
}

/// When a pipeline's stages reduce their gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PipelineReduce {
    /// With the last backward of each stage; until then a stage's gradients are held whole.
    #[default]
    #[serde(rename = "once")]
    Once,
    /// With every backward: as many times the messages, and no gradient held whole (stages 2 and 3).
    #[serde(rename = "each")]
    Each,
}

/// How ranks that share a sequence reach each other's keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContextMethod {
    /// Keys and values go round.
    #[default]
    #[serde(rename = "ring")]
    Ring,
    /// Positions are exchanged for heads.
    #[serde(rename = "ulysses")]
    Ulysses,
}

/// `[parallelism]`. A degree of -1 takes all ranks that the others leave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelismSection {
    /// Whether the planner chooses all of these, for the machines of `job.cluster`; the short form is
    /// `parallelism = "auto"`.
    pub auto: bool,
    /// Copies of the model that see different data.
    pub data_parallel_replicate_degree: i64,
    /// Ranks over which the state of one copy is sharded.
    pub data_parallel_shard_degree: i64,
    /// What those ranks shard: 1 optimiser states, 2 gradients too, 3 parameters too; with 0 nothing, so
    /// that they are copies over which experts can be laid.
    pub zero_stage: usize,
    /// Whether sharded parameters go after forward; stage 3 only. A pipeline's stages stay gathered from
    /// micro-batch to micro-batch, two of a rank's at once, all with `never`, none with `always`.
    pub fsdp_reshard_after_forward: ReshardAfterForward,
    /// How many units' parameters are gathered ahead of their use; stage 3 only.
    pub fsdp_prefetch: usize,
    /// Where parameters and optimiser states are kept while nobody computes with them.
    pub offload: Offload,
    /// The folder of the files, on a fast disk, for `nvme`.
    pub offload_folder: Option<PathBuf>,
    /// Ranks that share every matrix.
    pub tensor_parallel_degree: i64,
    /// Whether those ranks share the positions between matrices too, which takes less memory.
    pub enable_sequence_parallel: bool,
    /// Whether backward gathers those positions again: least memory, more bytes.
    pub sequence_parallel_regather: bool,
    /// Whether matrices are multiplied while positions and their gradients travel.
    pub enable_async_tensor_parallel: bool,
    /// Ranks that share the layers.
    pub pipeline_parallel_degree: i64,
    /// The order of their work: `1F1B`, `GPipe`, `interleaved`, `looped-bfs`, `zb-h1`, `zb-v`,
    /// `dualpipe-v`, or PyTorch's names.
    pub pipeline_parallel_schedule: String,
    /// A file with another order, a line per rank.
    pub pipeline_parallel_schedule_csv: Option<PathBuf>,
    /// Stages each rank has, in the schedules that leave it open.
    pub pipeline_parallel_stages_per_rank: usize,
    /// The blocks with which the second stage and those after it begin, as in `layers.2,layers.4`; where
    /// stages cost alike if absent.
    pub pipeline_parallel_split_points: Option<String>,
    /// When stages reduce gradients that are sharded.
    pub pipeline_parallel_reduce: PipelineReduce,
    /// Ranks that share a sequence.
    pub context_parallel_degree: i64,
    /// How they reach each other's keys and values.
    pub context_parallel_method: ContextMethod,
    /// Ranks that share the experts.
    pub expert_parallel_degree: i64,
    /// How many of those that follow each other are on one machine; as the launcher says if 0. Where they are
    /// on several, a token goes to a machine once, and from rank to rank inside of it.
    pub expert_parallel_local_degree: usize,
    /// Megabytes (2^20 bytes) of gradients that are reduced together.
    pub bucket_cap_mb: f64,
    /// The same for the first bucket to be ready, small so that reduction starts early.
    pub first_bucket_mb: f64,
    /// Whether reduction starts while backward goes on.
    pub overlap: bool,
    /// What is done to gradients before they travel.
    pub gradient_compression: GradientCompression,
    /// Whether a step may leave parameters without a gradient.
    pub find_unused_parameters: bool,
}

impl Default for ParallelismSection {
    fn default() -> Self {
        ParallelismSection {
            auto: false,
            data_parallel_replicate_degree: -1,
            data_parallel_shard_degree: 1,
            zero_stage: 3,
            fsdp_reshard_after_forward: ReshardAfterForward::Default,
            fsdp_prefetch: 1,
            offload: Offload::None,
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
            find_unused_parameters: false,
        }
    }
}

impl ParallelismSection {
    /// The order of a pipeline's work.
    pub fn schedule_kind(&self) -> Result<Kind, ConfigError> {
        let name = &self.pipeline_parallel_schedule;
        name.parse().map_err(|error: ScheduleError| {
            ConfigError::contradiction(
                format!("parallelism.pipeline_parallel_schedule = {name:?}"),
                error.to_string(),
            )
        })
    }

    /// The blocks with which the second stage and those after it begin, if they are given.
    pub fn split_points(&self) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(text) = &self.pipeline_parallel_split_points else {
            return Ok(None);
        };
        let refused = || {
            ConfigError::contradiction(
                format!(
                    "parallelism.pipeline_parallel_split_points = {text:?} is no list of blocks"
                ),
                "write rising numbers of blocks, as in \"layers.2,layers.4\"",
            )
        };
        let block = |name: &str| name.trim().strip_prefix("layers.")?.parse::<usize>().ok();
        let blocks: Option<Vec<usize>> = text.split(',').map(block).collect();
        let blocks = blocks.ok_or_else(refused)?;
        match blocks.windows(2).all(|pair| pair[0] < pair[1]) {
            true => Ok(Some(blocks)),
            false => Err(refused()),
        }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        self.schedule_kind()?;
        self.split_points()?;
        let chunks = self.pipeline_parallel_stages_per_rank as f64;
        within(
            "parallelism.pipeline_parallel_stages_per_rank",
            chunks,
            1.0,
            64.0,
        )?;
        // A bucket holds at least one parameter, so any cap above zero has a meaning.
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
            (Offload::Nvme | Offload::Cpu, _) if self.zero_stage != 3 => {
                Err(ConfigError::contradiction(
                    format!(
                        "parallelism.offload needs parameters that are gathered when needed, but \
                         parallelism.zero_stage = {}",
                        self.zero_stage
                    ),
                    "use parallelism.zero_stage = 3",
                ))
            }
            _ => Ok(()),
        }
    }
}
