//! `[training]`: data, batch sizes, sequence length, steps and types.

use std::path::PathBuf;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::{at_least_one, within};
use crate::{Choice, ConfigError};

/// The source of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dataset {
    /// Generated from the seed; endless and learnable.
    #[default]
    #[serde(rename = "synthetic")]
    Synthetic,
    /// A directory with the IDX files of MNIST.
    #[serde(rename = "mnist")]
    Mnist,
    /// A token file.
    #[serde(rename = "tokens")]
    Tokens,
}

/// An element type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dtype {
    /// 32 bits.
    #[default]
    #[serde(rename = "float32")]
    Float32,
    /// 64 bits.
    #[serde(rename = "float64")]
    Float64,
    /// 16 bits with the range of `float32`.
    #[serde(rename = "bfloat16")]
    Bfloat16,
    /// 16 bits with more precision and a small range: losses are scaled.
    #[serde(rename = "float16")]
    Float16,
}

impl Dtype {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Dtype::Bfloat16 | Dtype::Float16 => 2,
            Dtype::Float32 => 4,
            Dtype::Float64 => 8,
        }
    }

    /// The name in config files.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bfloat16 => "bfloat16",
            Dtype::Float16 => "float16",
            Dtype::Float32 => "float32",
            Dtype::Float64 => "float64",
        }
    }
}

/// `[training]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct TrainingSection {
    /// The source of samples.
    pub dataset: Choice<Dataset>,
    /// The file or directory of the dataset, if it has one.
    pub dataset_path: Option<PathBuf>,
    /// A loss that the program registers, in place of the model's own.
    pub loss: Option<String>,
    /// Chunks of a micro-batch's tokens for which the loss is computed one after the other, so that a decoder never has
    /// all logits at once; 1 for a whole micro-batch. The memory of logits is divided by this number.
    pub num_loss_chunks: usize,
    /// Micro-batch size: samples per rank and forward pass.
    pub local_batch_size: usize,
    /// Samples per optimizer step over all ranks; `local_batch_size` times the data-parallel degree if absent. If it is
    /// larger, ranks accumulate gradients.
    pub global_batch_size: Option<usize>,
    /// Sequence length: tokens per sample.
    pub seq_len: usize,
    /// The token that ends a document, for document masks.
    pub eos_token_id: Option<i64>,
    /// Maximum gradient norm; 0 turns clipping off.
    pub max_norm: f64,
    /// Optimizer steps.
    pub steps: u64,
    /// Passes over a finite dataset, which give the number of steps in place of `steps`.
    pub epochs: Option<u64>,
    /// Threads that load the samples of a rank.
    pub num_loader_threads: usize,
    /// Memory limit for the tensors of a rank, on a GPU for what its allocator reserves; 0 for no limit. A job that
    /// needs more is rejected before it starts, with suggestions that fit.
    pub memory_limit_bytes: u64,
    /// The type in which weights and optimizer state are held.
    pub dtype: Dtype,
    /// The type in which layers compute; `dtype` if absent.
    pub mixed_precision_param: Option<Dtype>,
    /// The type in which gradients travel between ranks; `dtype` if absent.
    pub mixed_precision_reduce: Option<Dtype>,
}

impl Default for TrainingSection {
    fn default() -> Self {
        TrainingSection {
            dataset: Dataset::Synthetic.into(),
            dataset_path: None,
            loss: None,
            num_loss_chunks: 1,
            local_batch_size: 8,
            global_batch_size: None,
            seq_len: 2048,
            eos_token_id: None,
            max_norm: 1.0,
            steps: 10_000,
            epochs: None,
            num_loader_threads: 1,
            memory_limit_bytes: 0,
            dtype: Dtype::Float32,
            mixed_precision_param: None,
            mixed_precision_reduce: None,
        }
    }
}

impl TrainingSection {
    /// The type in which layers compute.
    pub fn compute_dtype(&self) -> Dtype {
        self.mixed_precision_param.unwrap_or(self.dtype)
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        at_least_one("training.local_batch_size", self.local_batch_size as u64)?;
        at_least_one("training.seq_len", self.seq_len as u64)?;
        at_least_one("training.steps", self.steps)?;
        at_least_one("training.epochs", self.epochs.unwrap_or(1))?;
        at_least_one(
            "training.num_loader_threads",
            self.num_loader_threads as u64,
        )?;
        self.check_loss()?;
        self.check_batch_size()?;
        if let Some(global) = self.global_batch_size {
            at_least_one("training.global_batch_size", global as u64)?;
        }
        within("training.max_norm", self.max_norm, 0.0, f64::INFINITY)?;
        if self.dtype == Dtype::Float16 {
            return Err(ConfigError::contradiction(
                "training.dtype = \"float16\" leaves no room for small updates of weights",
                "use training.dtype = \"float32\" with training.mixed_precision_param = \"float16\"",
            ));
        }
        self.check_dataset_path()?;
        let mixed = [
            ("mixed_precision_param", self.mixed_precision_param),
            ("mixed_precision_reduce", self.mixed_precision_reduce),
        ];
        mixed
            .iter()
            .try_for_each(|&(key, dtype)| self.check_mixed(key, dtype))
    }

    /// Only the model's own loss can be computed in chunks.
    fn check_loss(&self) -> Result<(), ConfigError> {
        at_least_one("training.num_loss_chunks", self.num_loss_chunks as u64)?;
        if self.num_loss_chunks > 1 && self.compute_dtype() == Dtype::Float16 {
            return Err(ConfigError::contradiction(
                "training.num_loss_chunks > 1 computes gradients before they are scaled, which float16 needs",
                "use training.mixed_precision_param = \"bfloat16\", or remove training.num_loss_chunks",
            ));
        }
        match &self.loss {
            Some(loss) if self.num_loss_chunks > 1 => Err(ConfigError::contradiction(
                format!(
                    "training.num_loss_chunks = {} divides the model's own loss, but training.loss = {loss:?}",
                    self.num_loss_chunks
                ),
                "remove one of the two",
            )),
            _ => Ok(()),
        }
    }

    /// Kernels count the elements of a batch with 32 bits.
    fn check_batch_size(&self) -> Result<(), ConfigError> {
        const MOST: usize = i32::MAX as usize;
        let (local, length) = (self.local_batch_size, self.seq_len);
        if local
            .checked_mul(length)
            .is_some_and(|tokens| tokens <= MOST)
        {
            return Ok(());
        }
        Err(ConfigError::contradiction(
            format!(
                "training.local_batch_size = {local} with training.seq_len = {length} is more than {MOST} tokens at once"
            ),
            format!(
                "the largest valid choice is training.local_batch_size = {}",
                MOST / length
            ),
        ))
    }

    fn check_dataset_path(&self) -> Result<(), ConfigError> {
        let Choice::Builtin(dataset) = self.dataset else {
            return Ok(());
        };
        match (dataset != Dataset::Synthetic, &self.dataset_path) {
            (true, None) => Err(ConfigError::contradiction(
                "training.dataset is read from disk, but training.dataset_path is absent",
                "set training.dataset_path, or use training.dataset = \"synthetic\"",
            )),
            (false, Some(path)) => Err(ConfigError::contradiction(
                format!(
                    "training.dataset = \"synthetic\" reads no file, but training.dataset_path = {path:?}"
                ),
                "remove the path, or use training.dataset = \"tokens\" or \"mnist\"",
            )),
            _ => Ok(()),
        }
    }

    /// Mixed precision narrows: computing in a type wider than the weights gains nothing, and
    /// narrowing `float64` would lose what it was chosen for.
    fn check_mixed(&self, key: &str, mixed: Option<Dtype>) -> Result<(), ConfigError> {
        let Some(mixed) = mixed else { return Ok(()) };
        let is_narrow = matches!(mixed, Dtype::Bfloat16 | Dtype::Float16);
        let allowed = mixed == self.dtype || (self.dtype == Dtype::Float32 && is_narrow);
        if allowed {
            return Ok(());
        }
        let (held, asked) = (self.dtype.name(), mixed.name());
        Err(ConfigError::contradiction(
            format!(
                "training.dtype = \"{held}\" cannot be mixed with training.{key} = \"{asked}\""
            ),
            format!("remove training.{key}, or use training.dtype = \"float32\" with \"bfloat16\""),
        ))
    }
}
