//! `trainyard ckpt convert`: checkpoints to Hugging Face folders.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use clap::builder::PossibleValuesParser;
use trainyard_arch::DecoderConfig;
use trainyard_checkpoint::{Checkpoint, Dtype, ExportOptions, export, has_export, store};
use trainyard_config::{Config, Names};

use crate::failure::Failure;

/// Write the weights of a checkpoint as a Hugging Face folder. The other direction needs no conversion:
/// `--checkpoint.initial_load_path` reads such a folder
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard ckpt convert outputs/checkpoint my-llama\n  \
    trainyard ckpt convert outputs/checkpoint my-llama --dtype bfloat16 --overwrite\n  \
    trainyard ckpt convert outputs/checkpoint/step-500 my-llama --tokenizer tokenizer.json --max-shard-gb 2")]
pub struct Convert {
    /// The directory of a checkpoint, or of several (the newest is used), or s3://bucket/prefix
    from: PathBuf,
    /// The directory to write, or s3://bucket/prefix
    to: PathBuf,
    /// A tokenizer to copy next to the weights
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Maximum size of a file in GB
    #[arg(long, default_value_t = 5.0)]
    max_shard_gb: f64,
    /// The type of the weights; by default that of the checkpoint
    #[arg(long, value_name = "DTYPE", value_parser = PossibleValuesParser::new(DTYPES.map(|(name, _)| name)))]
    dtype: Option<String>,
    /// Replace the weights that the directory has
    #[arg(long)]
    overwrite: bool,
}

/// The types of weights by their names in PyTorch.
const DTYPES: [(&str, Dtype); 4] = [
    ("float64", Dtype::F64),
    ("float32", Dtype::F32),
    ("bfloat16", Dtype::BF16),
    ("float16", Dtype::F16),
];

impl Convert {
    pub(super) fn execute(self) -> Result<ExitCode, Failure> {
        let checkpoint = super::open(&self.from)?;
        let mut config = config_json(&checkpoint)?;
        if let Some(dtype) = &self.dtype {
            config["torch_dtype"] = dtype.as_str().into();
        }
        let config = format!("{config:#}\n");
        let named = |name: &String| DTYPES.iter().find(|(known, _)| known == name);
        let options = ExportOptions {
            max_bytes: (self.max_shard_gb.max(0.0) * 1e9) as u64,
            dtype: self.dtype.as_ref().and_then(named).map(|(_, dtype)| *dtype),
        };
        let to = store::open(&self.to).map_err(Failure::new)?;
        if !self.overwrite && has_export(&*to).map_err(Failure::new)? {
            let message = format!("{} has a model already", to.describe(""));
            return Err(Failure::new(message).hint("--overwrite replaces it"));
        }
        export(&checkpoint, &to, &config, options).map_err(Failure::new)?;
        if let Some(tokenizer) = &self.tokenizer {
            let text = std::fs::read(tokenizer)
                .map_err(|error| Failure::new(format!("{}: {error}", tokenizer.display())))?;
            to.put("tokenizer.json", &text).map_err(Failure::new)?;
        }
        println!("{} -> {}", checkpoint.path(), to.describe(""));
        Ok(ExitCode::SUCCESS)
    }
}

/// The `config.json` of the trained model.
fn config_json(checkpoint: &Checkpoint) -> Result<serde_json::Value, Failure> {
    let weights_only = "it has weights only: convert a checkpoint that a job has saved";
    let state = checkpoint
        .state()
        .ok_or_else(|| Failure::new(weights_only))?;
    let config = Config::parse_with(&state.config, &[], &Names::any()).map_err(Failure::new)?;
    let model = config.model.resolve().map_err(Failure::new)?;
    let json = model.decoder().and_then(DecoderConfig::to_hugging_face);
    json.ok_or_else(|| Failure::new("Hugging Face has no such model"))
}
