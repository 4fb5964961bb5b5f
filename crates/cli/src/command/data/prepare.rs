//! Text into token files.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use trainyard_text::{Options, TextError, prepare};

use crate::failure::Failure;

/// Tokenise text into a folder of token files; a run that was interrupted goes on where it stopped
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard data prepare --tokenizer tokenizer.json --output tokens a.jsonl b.parquet\n  \
    trainyard train config.toml --training.dataset tokens --training.dataset_path tokens")]
pub struct Prepare {
    /// JSON lines (.jsonl, .json), a document each, Parquet (.parquet), a document a row, or plain text, a
    /// document a line
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// The folder to write
    #[arg(long, value_name = "FOLDER")]
    output: PathBuf,
    /// A tokenizer.json
    #[arg(long, value_name = "FILE")]
    tokenizer: PathBuf,
    /// The key of a JSON line, or the column of a Parquet file, that has the text
    #[arg(long, default_value = "text")]
    field: String,
    /// A token to put after every document, by its text, as in </s>
    #[arg(long, value_name = "TOKEN")]
    end_of_document: Option<String>,
    /// Threads; one per core if not given
    #[arg(long)]
    threads: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Prepare {
    pub(super) fn execute(self) -> Result<ExitCode, Failure> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let options = Options {
            num_threads: self.threads.unwrap_or(cores),
            inputs: self.inputs,
            output: self.output,
            tokenizer: self.tokenizer,
            field: self.field,
            end_of_document: self.end_of_document,
        };
        let size = |path: &PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
        let style = ProgressStyle::with_template(
            "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
        );
        let bar = ProgressBar::new(options.inputs.iter().map(size).sum());
        bar.set_style(style.map_err(Failure::new)?);
        let prepared = prepare(&options, &|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        let summary = prepared.map_err(|error| match error {
            TextError::Tokenizer { .. } => Failure::new(error)
                .hint("a tokenizer.json comes with every model of Hugging Face's"),
            other => Failure::new(other),
        })?;
        if self.json {
            println!("{}", serde_json::json!(summary));
            return Ok(ExitCode::SUCCESS);
        }
        println!(
            "{} documents, {} tokens in {} files ({} were there) in {}",
            summary.num_documents,
            summary.num_tokens,
            summary.num_files,
            summary.num_there,
            options.output.display()
        );
        Ok(ExitCode::SUCCESS)
    }
}
