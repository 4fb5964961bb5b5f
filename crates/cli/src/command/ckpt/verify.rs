//! `trainyard ckpt verify`: checks every digest of a checkpoint.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use trainyard_trace::readable_bytes;

use crate::failure::Failure;

/// Read a checkpoint and check every digest
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard ckpt verify outputs/checkpoint/step-500\n  \
    trainyard ckpt verify s3://bucket/prefix --json")]
pub struct Verify {
    /// The directory of a checkpoint, or of several (the newest is used), or s3://bucket/prefix
    path: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Verify {
    pub(super) fn execute(self) -> Result<ExitCode, Failure> {
        let checkpoint = super::open(&self.path)?;
        let files = &checkpoint.manifest().files;
        let total: u64 = files.values().map(|file| file.num_bytes).sum();
        let style = ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes}, {eta} left");
        let bar = ProgressBar::new(total).with_style(style.map_err(Failure::new)?);
        let verified = checkpoint.verify(|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        verified.map_err(Failure::new)?;
        let has_digests = files.values().all(|file| file.block_digests.is_some());
        if self.json {
            let result = json!({
                "checkpoint": checkpoint.path(),
                "num_files": files.len(),
                "num_bytes": total,
                "has_digests": has_digests,
            });
            println!("{result}");
            return Ok(ExitCode::SUCCESS);
        }
        let trust = if has_digests {
            "all digests match"
        } else {
            "complete; it has no digests"
        };
        println!("{}: {}, {trust}", checkpoint.path(), readable_bytes(total));
        Ok(ExitCode::SUCCESS)
    }
}
