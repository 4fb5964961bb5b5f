//! `trainyard ckpt convert`: checkpoints to Hugging Face folders.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use trainyard_arch::DecoderConfig;
use trainyard_checkpoint::{Checkpoint, export, store};
use trainyard_config::{Config, Names};

use crate::failure::Failure;

/// Write the weights of a checkpoint as a Hugging Face folder. The other direction needs no conversion:
/// `--checkpoint.initial_load_path` reads such a folder
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard ckpt convert outputs/checkpoint my-llama\n  \
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
}

impl Convert {
    pub(super) fn execute(self) -> Result<ExitCode, Failure> {
        let checkpoint = super::open(&self.from)?;
        let config = config_json(&checkpoint)?;
        let max_bytes = (self.max_shard_gb.max(0.0) * 1e9) as u64;
        let to = store::open(&self.to).map_err(Failure::new)?;
        export(&checkpoint, &to, &config, max_bytes).map_err(Failure::new)?;
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
fn config_json(checkpoint: &Checkpoint) -> Result<String, Failure> {
    let weights_only = "it has weights only: convert a checkpoint that a job has saved";
    let state = checkpoint
        .state()
        .ok_or_else(|| Failure::new(weights_only))?;
    let config = Config::parse_with(&state.config, &[], &Names::any()).map_err(Failure::new)?;
    let model = config.model.resolve().map_err(Failure::new)?;
    match model.decoder().and_then(DecoderConfig::to_hugging_face) {
        Some(json) => Ok(format!("{json:#}\n")),
        None => Err(Failure::new("Hugging Face has no such model")),
    }
}
