//! `trainyard data verify`: checks prepared token files.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use trainyard_tokenize::{Index, verify};
use trainyard_trace::counted;

use crate::failure::Failure;

/// Check the digests and the tokens of prepared token files
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainyard data verify tokens")]
pub struct Verify {
    /// A directory that `data prepare` wrote
    directory: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Verify {
    pub(super) fn execute(self) -> Result<ExitCode, Failure> {
        let index = Index::read(&self.directory).map_err(Failure::new)?;
        let size = |path: PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
        let paths = index.paths(&self.directory).into_iter();
        let bar = super::progress_bar(paths.map(size).sum())?;
        let verified = verify(&self.directory, &|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        let index = verified.map_err(|error| {
            Failure::new(error).hint("delete the file and repeat `trainyard data prepare`")
        })?;
        let num_tokens: u64 = index.shards.iter().map(|shard| shard.num_tokens).sum();
        if self.json {
            let num_files = index.shards.len();
            let summary = serde_json::json!({ "num_files": num_files, "num_tokens": num_tokens });
            println!("{summary}");
        } else {
            println!(
                "{} in {} as prepared",
                counted(num_tokens, "token"),
                counted(index.shards.len() as u64, "file")
            );
        }
        Ok(ExitCode::SUCCESS)
    }
}
