//! `trainyard data prepare`: text into token files, and digits into files of images.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use trainyard_tokenize::{Documents, Options, TokenizeError, files_in, prepare};
use trainyard_trace::counted;

use super::mnist::Mnist;
use crate::failure::Failure;

/// Tokenize text into a directory of token files; an interrupted run continues where it stopped
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard data prepare --tokenizer tokenizer.json --output tokens a.jsonl b.parquet\n  \
    trainyard data prepare --tokenizer tokenizer.json --output tokens --documents file books/\n  \
    trainyard train config.toml --training.dataset tokens --training.dataset_path tokens")]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Prepare {
    #[command(subcommand)]
    dataset: Option<NamedDataset>,
    #[command(flatten)]
    text: Option<Text>,
}

/// A dataset that is prepared in its own way.
#[derive(Debug, Subcommand)]
enum NamedDataset {
    Mnist(Mnist),
}

/// Text and how it is tokenized.
#[derive(Debug, Args)]
struct Text {
    /// JSON lines (.jsonl, .json) with one document per line, Parquet (.parquet) with one per row, plain text, or
    /// folders of such files
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// The output directory
    #[arg(long, value_name = "FOLDER")]
    output: PathBuf,
    /// The tokenizer.json of a model
    #[arg(long, value_name = "FILE")]
    tokenizer: PathBuf,
    /// What a document of plain text is
    #[arg(long, value_enum, default_value_t = DocumentUnit::Line)]
    documents: DocumentUnit,
    /// The JSON key or Parquet column of the text
    #[arg(long, default_value = "text")]
    field: String,
    /// The token to append to every document, as in </s>
    #[arg(long, value_name = "TOKEN")]
    end_of_document: Option<String>,
    /// Threads; one per core by default
    #[arg(long)]
    threads: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What a document of plain text is.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum DocumentUnit {
    /// Every line
    Line,
    /// Every file
    File,
}

impl Prepare {
    pub(super) fn execute(self) -> Result<ExitCode, Failure> {
        match (self.dataset, self.text) {
            (Some(NamedDataset::Mnist(mnist)), _) => mnist.execute(),
            (None, Some(text)) => text.execute(),
            (None, None) => Err(Failure::new("nothing to prepare: name text files")),
        }
    }
}

impl Text {
    fn execute(self) -> Result<ExitCode, Failure> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let inputs = self.inputs.iter().map(|path| files_in(path));
        let inputs = inputs
            .collect::<Result<Vec<_>, _>>()
            .map_err(Failure::new)?;
        let options = Options {
            num_threads: self.threads.unwrap_or(cores),
            inputs: inputs.concat(),
            documents: match self.documents {
                DocumentUnit::Line => Documents::Line,
                DocumentUnit::File => Documents::File,
            },
            output: self.output,
            tokenizer: self.tokenizer,
            field: self.field,
            end_of_document: self.end_of_document,
        };
        let size = |path: &PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
        let bar = super::progress_bar(options.inputs.iter().map(size).sum())?;
        let prepared = prepare(&options, &|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        let summary = prepared.map_err(|error| match error {
            TokenizeError::Tokenizer { .. } => {
                Failure::new(error).hint("every Hugging Face model has a tokenizer.json")
            }
            other => Failure::new(other),
        })?;
        if self.json {
            println!("{}", serde_json::json!(summary));
            return Ok(ExitCode::SUCCESS);
        }
        println!(
            "{}, {} in {} ({} existed) in {}",
            counted(summary.num_documents, "document"),
            counted(summary.num_tokens, "token"),
            counted(summary.num_files, "file"),
            summary.num_reused,
            options.output.display()
        );
        Ok(ExitCode::SUCCESS)
    }
}
