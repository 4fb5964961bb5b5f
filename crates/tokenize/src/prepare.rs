//! Tokenization of all input shards on several threads.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use crate::index::{INDEX_FILE, Index, Shard};
use crate::input_shard::{InputRange, InputShard, SHARD_BYTES, input_shards, is_json};
use crate::row_group::RowGroup;
use crate::token_file::{HEADER_BYTES, Width, read_header};
use crate::token_writer::TokenWriter;
use crate::write_atomic::write_atomic;
use crate::{Result, TokenizeError};

const SETTINGS: &str = "settings.json";

/// What a document of plain text is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Documents {
    /// A line.
    #[default]
    Line,
    /// A file.
    File,
}

/// The inputs, the output and the tokenizer of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// JSON lines (`.jsonl`, `.json`) with a document per line, Parquet (`.parquet`) with a document per
    /// row, or plain text. [`files_in`](crate::files_in) finds those of a directory.
    pub inputs: Vec<PathBuf>,
    /// What a document of plain text is.
    pub documents: Documents,
    /// The output directory.
    pub output: PathBuf,
    /// A `tokenizer.json`.
    pub tokenizer: PathBuf,
    /// The JSON key or the Parquet column that has the text.
    pub field: String,
    /// The token to append to every document, by its text.
    pub end_of_document: Option<String>,
    /// The number of threads.
    pub num_threads: usize,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// The number of token files.
    pub num_files: u64,
    /// The number of token files that an earlier run had completed.
    pub num_reused: u64,
    /// The number of documents.
    pub num_documents: u64,
    /// The number of tokens.
    pub num_tokens: u64,
}

/// The inputs and options of a directory's token files. A directory never mixes files of different settings.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Settings {
    inputs: Vec<Input>,
    shard_bytes: u64,
    tokenizer: String,
    field: String,
    #[serde(default)]
    documents: Documents,
    end_of_document: Option<String>,
}

/// The identity of an input file, from its metadata alone.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Input {
    path: PathBuf,
    num_bytes: u64,
    modified: Option<SystemTime>,
}

/// Tokenizes all inputs. Calls `progress` with the number of input bytes processed since the last call.
pub fn prepare(options: &Options, progress: &(dyn Fn(u64) + Sync)) -> Result<Summary> {
    let output = &options.output;
    fs::create_dir_all(output).map_err(TokenizeError::io(output))?;
    let worker = Worker::new(options)?;
    check_settings(options)?;
    let inputs = input_shards(
        &options.inputs,
        &options.field,
        options.documents,
        SHARD_BYTES,
    )?;
    let shards = worker.run(&inputs, options.num_threads.max(1), progress)?;
    let mut summary = Summary::default();
    for (shard, is_reused) in &shards {
        summary.num_files += 1;
        summary.num_reused += u64::from(*is_reused);
        summary.num_documents += shard.num_documents;
        summary.num_tokens += shard.num_tokens;
    }
    let index = Index {
        vocab_size: worker.vocab_size,
        shards: shards.into_iter().map(|(shard, _)| shard).collect(),
    };
    write_atomic(
        &output.join(INDEX_FILE),
        &serde_json::to_vec_pretty(&index).unwrap_or_default(),
    )?;
    Ok(summary)
}

/// Rejects an output directory with token files of other settings, and writes the settings file.
fn check_settings(options: &Options) -> Result<()> {
    let identify = |path: &PathBuf| -> Result<Input> {
        let metadata = fs::metadata(path).map_err(TokenizeError::io(path))?;
        Ok(Input {
            path: path.clone(),
            num_bytes: metadata.len(),
            modified: metadata.modified().ok(),
        })
    };
    let tokenizer = &options.tokenizer;
    let text = fs::read(tokenizer).map_err(TokenizeError::io(tokenizer))?;
    let settings = Settings {
        inputs: options.inputs.iter().map(identify).collect::<Result<_>>()?,
        shard_bytes: SHARD_BYTES,
        tokenizer: blake3::hash(&text).to_hex().to_string(),
        field: options.field.clone(),
        documents: options.documents,
        end_of_document: options.end_of_document.clone(),
    };
    let path = options.output.join(SETTINGS);
    match fs::read(&path) {
        Ok(text) => {
            let is_same = serde_json::from_slice::<Settings>(&text).is_ok_and(|s| s == settings);
            if is_same || !has_tokens(&options.output)? {
                write_atomic(
                    &path,
                    &serde_json::to_vec_pretty(&settings).unwrap_or_default(),
                )
            } else {
                Err(TokenizeError::OtherSettings {
                    path: options.output.clone(),
                })
            }
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(TokenizeError::io(&path)(error))
        }
        Err(_) => write_atomic(
            &path,
            &serde_json::to_vec_pretty(&settings).unwrap_or_default(),
        ),
    }
}

/// Whether the directory has a token file. Settings without token files may be overwritten.
fn has_tokens(dir: &Path) -> Result<bool> {
    let mut entries = fs::read_dir(dir).map_err(TokenizeError::io(dir))?;
    Ok(entries.any(|entry| entry.is_ok_and(|e| e.path().extension().is_some_and(|x| x == "bin"))))
}

/// The tokenizer and the options, shared by all threads.
struct Worker<'a> {
    options: &'a Options,
    tokenizer: Tokenizer,
    vocab_size: usize,
    width: Width,
    end: Option<u32>,
}

impl<'a> Worker<'a> {
    fn new(options: &'a Options) -> Result<Worker<'a>> {
        let invalid = |reason: String| TokenizeError::Tokenizer {
            path: options.tokenizer.clone(),
            reason,
        };
        let mut tokenizer =
            Tokenizer::from_file(&options.tokenizer).map_err(|e| invalid(e.to_string()))?;
        // Documents are tokenized completely, even if the tokenizer is configured to truncate or pad.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|e| invalid(e.to_string()))?;
        // Token ids may have gaps, so the largest id determines the vocabulary size.
        let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
        let vocab_size = largest as usize + 1;
        let find = |text: &String| {
            let missing = || {
                invalid(format!(
                    "the vocabulary has no token {text:?} to end documents"
                ))
            };
            tokenizer.token_to_id(text).ok_or_else(missing)
        };
        let end = options.end_of_document.as_ref().map(find).transpose()?;
        Ok(Worker {
            width: Width::of(vocab_size),
            vocab_size,
            end,
            options,
            tokenizer,
        })
    }

    /// Tokenizes all input shards on `num_threads` threads; the first error stops all of them. Returns the
    /// token files in order, and whether each was reused.
    fn run(
        &self,
        inputs: &[InputShard],
        num_threads: usize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Vec<(Shard, bool)>> {
        let (next, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let done = Mutex::new(Vec::with_capacity(inputs.len()));
        let push = |result| {
            done.lock().unwrap_or_else(|e| e.into_inner()).push(result);
        };
        std::thread::scope(|scope| {
            for _ in 0..num_threads {
                scope.spawn(|| {
                    while !has_failed.load(Ordering::Relaxed) {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let Some(input) = inputs.get(number) else {
                            break;
                        };
                        let shard = self.tokenize(input);
                        has_failed.fetch_or(shard.is_err(), Ordering::Relaxed);
                        progress(input.num_bytes);
                        push((number, shard));
                    }
                });
            }
        });
        let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
        done.sort_by_key(|(number, _)| *number);
        done.into_iter().map(|(_, shard)| shard).collect()
    }

    /// Writes the token file of an input shard, unless an earlier run has completed it.
    fn tokenize(&self, input: &InputShard) -> Result<(Shard, bool)> {
        let path = self.options.output.join(&input.token_file);
        let documents = path.with_extension("documents");
        let count = |text: String| text.trim().parse().ok();
        let shard = |num_tokens, num_documents| -> Result<Shard> {
            Ok(Shard {
                file: input.token_file.clone(),
                num_tokens,
                num_documents,
                digest: digest(&path)?,
            })
        };
        if let Some(num_tokens) = completed_tokens(&path)
            && let Some(num_documents) = fs::read_to_string(&documents).ok().and_then(count)
        {
            return Ok((shard(num_tokens, num_documents)?, true));
        }
        let mut tokens = TokenWriter::create(&path, self.width)?;
        let num_documents = match &input.range {
            InputRange::Lines(bytes) => self.lines(&input.path, bytes, &mut tokens)?,
            InputRange::RowGroup(group) => self.row_group(&input.path, group, &mut tokens)?,
            InputRange::Files(files) => self.files(files, &mut tokens)?,
        };
        write_atomic(&documents, format!("{num_documents}\n").as_bytes())?;
        Ok((shard(tokens.finish()?, num_documents)?, false))
    }

    /// Writes the tokens of a range of lines and returns the number of documents.
    fn lines(&self, path: &Path, bytes: &Range<u64>, tokens: &mut TokenWriter) -> Result<u64> {
        let file = File::open(path).map_err(TokenizeError::io(path))?;
        let mut text = vec![0; (bytes.end - bytes.start) as usize];
        let read = file.read_exact_at(&mut text, bytes.start);
        read.map_err(TokenizeError::io(path))?;
        let is_json = is_json(path);
        let (mut num_documents, mut offset) = (0, bytes.start);
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            let invalid = |reason: String| TokenizeError::Line {
                path: path.to_owned(),
                offset,
                reason,
            };
            let document = document(line, is_json, &self.options.field).map_err(invalid)?;
            if !document.is_empty() {
                self.encode(&document, tokens).map_err(invalid)?;
                num_documents += 1;
            }
            offset += line.len() as u64;
        }
        Ok(num_documents)
    }

    /// Writes the tokens of whole files and returns the number of documents.
    fn files(&self, files: &[PathBuf], tokens: &mut TokenWriter) -> Result<u64> {
        let mut num_documents = 0;
        for path in files {
            let invalid = |reason: String| TokenizeError::Line {
                path: path.to_owned(),
                offset: 0,
                reason,
            };
            let bytes = fs::read(path).map_err(TokenizeError::io(path))?;
            let text = String::from_utf8(bytes).map_err(|e| invalid(format!("not UTF-8: {e}")))?;
            if !text.is_empty() {
                self.encode(&text, tokens).map_err(invalid)?;
                num_documents += 1;
            }
        }
        Ok(num_documents)
    }

    /// Writes the tokens of a row group and returns the number of documents.
    fn row_group(&self, path: &Path, group: &RowGroup, tokens: &mut TokenWriter) -> Result<u64> {
        let mut num_documents = 0;
        group.for_each_document(path, |document| {
            if !document.is_empty() {
                self.encode(document, tokens)?;
                num_documents += 1;
            }
            Ok(())
        })?;
        Ok(num_documents)
    }

    fn encode(&self, document: &str, tokens: &mut TokenWriter) -> Result<(), String> {
        let encoding = self.tokenizer.encode_fast(document, false);
        let encoding = encoding.map_err(|e| e.to_string())?;
        let ids = encoding.get_ids().iter().copied().chain(self.end);
        tokens.write(ids).map_err(|e| e.to_string())
    }
}

/// The digest of a file, which was just written and is still in memory, unless an earlier run wrote it.
fn digest(path: &Path) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let file = File::open(path).map_err(TokenizeError::io(path))?;
    let read = hasher.update_reader(file);
    read.map_err(TokenizeError::io(path))?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// The number of tokens in a complete token file; `None` if it does not exist or is not complete.
fn completed_tokens(path: &Path) -> Option<u64> {
    let file = File::open(path).ok()?;
    let size = file.metadata().ok()?.len();
    let mut header = [0; HEADER_BYTES as usize];
    file.read_exact_at(&mut header, 0).ok()?;
    read_header(&header, size).ok().map(|(_, num)| num)
}

/// The text of the document in a line; empty for a blank line.
fn document(line: &[u8], is_json: bool, field: &str) -> Result<String, String> {
    let line = str::from_utf8(line).map_err(|e| format!("not UTF-8: {e}"))?;
    let line = line.trim_end_matches(['\n', '\r']);
    if !is_json {
        return Ok(line.to_owned());
    }
    if line.trim().is_empty() {
        return Ok(String::new());
    }
    let value: serde_json::Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
    match value.get(field) {
        Some(serde_json::Value::String(text)) => Ok(text.clone()),
        Some(_) => Err(format!("the value of {field:?} is not a string")),
        None => Err(format!(
            "the document has no key {field:?}: name the key with --field"
        )),
    }
}
