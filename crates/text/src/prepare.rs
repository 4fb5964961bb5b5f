//! The work itself: pieces to token files, on several threads.

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

use crate::index::{INDEX, Index, Shard};
use crate::pieces::{PIECE, Part, Piece, pieces};
use crate::put::put;
use crate::row_group::RowGroup;
use crate::token_file::{HEADER, Width, read_header};
use crate::token_writer::TokenWriter;
use crate::{Result, TextError};

const SETTINGS: &str = "settings.json";

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Options {
    /// JSON lines (`.jsonl`, `.json`), a document each, Parquet (`.parquet`), a document a row, or plain
    /// text, a document a line.
    pub inputs: Vec<PathBuf>,
    /// Where token files go.
    pub output: PathBuf,
    /// A `tokenizer.json`.
    pub tokenizer: PathBuf,
    /// The key of a JSON line, or the column of a Parquet file, that has the text.
    pub field: String,
    /// A token to put after every document, by its text.
    pub end_of_document: Option<String>,
    /// Threads.
    pub num_threads: usize,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Token files.
    pub num_files: u64,
    /// Of which so many were there already.
    pub num_there: u64,
    /// Documents.
    pub num_documents: u64,
    /// Tokens.
    pub num_tokens: u64,
}

/// What token files were made of; others must not be mixed with them.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Settings {
    inputs: Vec<Input>,
    piece: u64,
    tokenizer: String,
    field: String,
    end_of_document: Option<String>,
}

/// An input as it was, as far as a look at it tells.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Input {
    path: PathBuf,
    num_bytes: u64,
    modified: Option<SystemTime>,
}

/// Turns all inputs into token files. `progress` is told of bytes of text that are done.
pub fn prepare(options: &Options, progress: &(dyn Fn(u64) + Sync)) -> Result<Summary> {
    let output = &options.output;
    fs::create_dir_all(output).map_err(TextError::io(output))?;
    let work = Work::new(options)?;
    settle(options)?;
    let pieces = pieces(&options.inputs, &options.field, PIECE)?;
    let shards = work.run(&pieces, options.num_threads.max(1), progress)?;
    let mut summary = Summary::default();
    for (shard, was_there) in &shards {
        summary.num_files += 1;
        summary.num_there += u64::from(*was_there);
        summary.num_documents += shard.num_documents;
        summary.num_tokens += shard.num_tokens;
    }
    let index = Index {
        vocab_size: work.vocab_size,
        shards: shards.into_iter().map(|(shard, _)| shard).collect(),
    };
    put(
        &output.join(INDEX),
        &serde_json::to_vec_pretty(&index).unwrap_or_default(),
    )?;
    Ok(summary)
}

/// Refuses a folder with tokens of something else; notes what these are of.
fn settle(options: &Options) -> Result<()> {
    let look = |path: &PathBuf| -> Result<Input> {
        let metadata = fs::metadata(path).map_err(TextError::io(path))?;
        Ok(Input {
            path: path.clone(),
            num_bytes: metadata.len(),
            modified: metadata.modified().ok(),
        })
    };
    let tokenizer = &options.tokenizer;
    let text = fs::read(tokenizer).map_err(TextError::io(tokenizer))?;
    let settings = Settings {
        inputs: options.inputs.iter().map(look).collect::<Result<_>>()?,
        piece: PIECE,
        tokenizer: blake3::hash(&text).to_hex().to_string(),
        field: options.field.clone(),
        end_of_document: options.end_of_document.clone(),
    };
    let path = options.output.join(SETTINGS);
    match fs::read(&path) {
        Ok(text) => {
            let is_same = serde_json::from_slice::<Settings>(&text).is_ok_and(|s| s == settings);
            match is_same || !has_tokens(&options.output)? {
                true => put(
                    &path,
                    &serde_json::to_vec_pretty(&settings).unwrap_or_default(),
                ),
                false => Err(TextError::OtherSettings {
                    path: options.output.clone(),
                }),
            }
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(TextError::io(&path)(error)),
        Err(_) => put(
            &path,
            &serde_json::to_vec_pretty(&settings).unwrap_or_default(),
        ),
    }
}

/// Whether any token file is there: settings that came to nothing may be changed.
fn has_tokens(folder: &Path) -> Result<bool> {
    let mut entries = fs::read_dir(folder).map_err(TextError::io(folder))?;
    Ok(entries.any(|entry| entry.is_ok_and(|e| e.path().extension().is_some_and(|x| x == "bin"))))
}

/// What every thread knows.
struct Work<'a> {
    options: &'a Options,
    tokenizer: Tokenizer,
    vocab_size: usize,
    width: Width,
    end: Option<u32>,
}

impl<'a> Work<'a> {
    fn new(options: &'a Options) -> Result<Work<'a>> {
        let refused = |reason: String| TextError::Tokenizer {
            path: options.tokenizer.clone(),
            reason,
        };
        let mut tokenizer =
            Tokenizer::from_file(&options.tokenizer).map_err(|e| refused(e.to_string()))?;
        // Documents come whole, whatever the model it was made for wants.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|e| refused(e.to_string()))?;
        // Numbers may have gaps, so the largest one counts.
        let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
        let vocab_size = largest as usize + 1;
        let find = |text: &String| {
            let missing = || refused(format!("it has no token {text:?} to end documents with"));
            tokenizer.token_to_id(text).ok_or_else(missing)
        };
        let end = options.end_of_document.as_ref().map(find).transpose()?;
        Ok(Work {
            width: Width::of(vocab_size),
            vocab_size,
            end,
            options,
            tokenizer,
        })
    }

    /// All pieces, by as many threads; the first failure ends them all. Returns the shards in order, and
    /// whether each was there.
    fn run(
        &self,
        pieces: &[Piece],
        num_threads: usize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Vec<(Shard, bool)>> {
        let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let done = Mutex::new(Vec::with_capacity(pieces.len()));
        let note = |found| {
            done.lock().unwrap_or_else(|e| e.into_inner()).push(found);
        };
        std::thread::scope(|scope| {
            for _ in 0..num_threads {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let Some(piece) = pieces.get(number) else {
                            break;
                        };
                        let shard = self.piece(piece);
                        is_over.fetch_or(shard.is_err(), Ordering::Relaxed);
                        progress(piece.num_bytes);
                        note((number, shard));
                    }
                });
            }
        });
        let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
        done.sort_by_key(|(number, _)| *number);
        done.into_iter().map(|(_, shard)| shard).collect()
    }

    fn piece(&self, piece: &Piece) -> Result<(Shard, bool)> {
        let path = self.options.output.join(&piece.file);
        let documents = path.with_extension("documents");
        if let Some(num_tokens) = there(&path)
            && let Some(num_documents) = fs::read_to_string(&documents)
                .ok()
                .and_then(|text| text.trim().parse().ok())
        {
            let shard = Shard {
                file: piece.file.clone(),
                num_tokens,
                num_documents,
            };
            return Ok((shard, true));
        }
        let mut tokens = TokenWriter::create(&path, self.width)?;
        let num_documents = match &piece.part {
            Part::Lines(bytes) => self.lines(&piece.path, bytes, &mut tokens)?,
            Part::RowGroup(group) => self.row_group(&piece.path, group, &mut tokens)?,
        };
        put(&documents, format!("{num_documents}\n").as_bytes())?;
        let shard = Shard {
            file: piece.file.clone(),
            num_tokens: tokens.finish()?,
            num_documents,
        };
        Ok((shard, false))
    }

    /// Writes the tokens of some lines; returns of how many documents.
    fn lines(&self, path: &Path, bytes: &Range<u64>, tokens: &mut TokenWriter) -> Result<u64> {
        let file = File::open(path).map_err(TextError::io(path))?;
        let mut text = vec![0; (bytes.end - bytes.start) as usize];
        let read = file.read_exact_at(&mut text, bytes.start);
        read.map_err(TextError::io(path))?;
        let is_json = path
            .extension()
            .is_some_and(|extension| extension == "jsonl" || extension == "json");
        let (mut num_documents, mut at) = (0, bytes.start);
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            let wrong = |reason: String| TextError::Line {
                path: path.to_owned(),
                at,
                reason,
            };
            let document = document(line, is_json, &self.options.field).map_err(wrong)?;
            if !document.is_empty() {
                self.encode(&document, tokens).map_err(wrong)?;
                num_documents += 1;
            }
            at += line.len() as u64;
        }
        Ok(num_documents)
    }

    /// Writes the tokens of a row group; returns of how many documents.
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

/// How many tokens a finished file has; none if it is not there, or not whole.
fn there(path: &Path) -> Option<u64> {
    let file = File::open(path).ok()?;
    let size = file.metadata().ok()?.len();
    let mut header = [0; HEADER as usize];
    file.read_exact_at(&mut header, 0).ok()?;
    read_header(&header, size).ok().map(|(_, num)| num)
}

/// The text of a line; empty where there is none.
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
        Some(_) => Err(format!("{field:?} is no text")),
        None => Err(format!("there is no {field:?}: name the key with --field")),
    }
}
