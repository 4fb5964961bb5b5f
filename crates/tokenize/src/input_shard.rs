//! Division of the inputs into shards: text at line ends or by file, Parquet by row group.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::row_group::{RowGroup, row_groups};
use crate::{Documents, Result, TokenizeError};

/// The approximate size of an input shard of text, in bytes.
pub const SHARD_BYTES: u64 = 16 << 20;
/// The size of the buffer for the search of a line end, in bytes.
const BUFFER: usize = 64 << 10;

/// Complete documents of one input, which become one token file.
#[derive(Clone, Debug, PartialEq)]
pub struct InputShard {
    /// The input file.
    pub path: PathBuf,
    /// The documents of the input that the shard has.
    pub range: InputRange,
    /// The bytes of the input that count as processed with this shard, for progress reports.
    pub num_bytes: u64,
    /// The name of its token file.
    pub token_file: String,
}

/// A range of an input file.
#[derive(Clone, Debug, PartialEq)]
pub enum InputRange {
    /// A byte range that consists of complete lines.
    Lines(Range<u64>),
    /// A row group of a Parquet file.
    RowGroup(Box<RowGroup>),
    /// Whole files, each of which is a document: the input and those after it.
    Files(Vec<PathBuf>),
}

/// Divides the inputs into shards. Shards of text have about `size` bytes each. `field` is the text column of
/// Parquet files, and `documents` says what a document of plain text is.
pub fn input_shards(
    inputs: &[PathBuf],
    field: &str,
    documents: Documents,
    size: u64,
) -> Result<Vec<InputShard>> {
    let mut shards: Vec<InputShard> = Vec::new();
    for (number, path) in inputs.iter().enumerate() {
        let is_document = documents == Documents::File && !has_records(path);
        if is_document && let Some(last) = shards.last_mut() {
            let num_bytes = size_of(path)?;
            if last.num_bytes.saturating_add(num_bytes) <= size
                && let InputRange::Files(files) = &mut last.range
            {
                files.push(path.clone());
                last.num_bytes += num_bytes;
                continue;
            }
        }
        let ranges = if is_document {
            vec![(size_of(path)?, InputRange::Files(vec![path.clone()]))]
        } else if extension_is(path, &["parquet"]) {
            row_group_ranges(path, field)?
        } else {
            line_ranges(path, size)?
        };
        for (index, (num_bytes, range)) in ranges.into_iter().enumerate() {
            shards.push(InputShard {
                path: path.clone(),
                range,
                num_bytes,
                token_file: format!("{number:05}-{index:05}.bin"),
            });
        }
    }
    Ok(shards)
}

/// Whether the lines of a file are JSON.
pub fn is_json(path: &Path) -> bool {
    extension_is(path, &["jsonl", "json"])
}

/// Whether a file consists of records with a text each, whatever the documents of plain text are.
fn has_records(path: &Path) -> bool {
    is_json(path) || extension_is(path, &["parquet"])
}

fn extension_is(path: &Path, names: &[&str]) -> bool {
    let extension = path.extension();
    extension.is_some_and(|extension| names.iter().any(|name| extension == *name))
}

fn size_of(path: &Path) -> Result<u64> {
    let metadata = std::fs::metadata(path).map_err(TokenizeError::io(path))?;
    Ok(metadata.len())
}

fn line_ranges(path: &Path, size: u64) -> Result<Vec<(u64, InputRange)>> {
    let lines = |bytes: Range<u64>| (bytes.end - bytes.start, InputRange::Lines(bytes));
    Ok(split_at_lines(path, size)?.into_iter().map(lines).collect())
}

/// Row groups have about the same size, so each counts as the same fraction of the file.
fn row_group_ranges(path: &Path, field: &str) -> Result<Vec<(u64, InputRange)>> {
    let row_groups = row_groups(path, field)?;
    let (size, count) = (u128::from(size_of(path)?), row_groups.len() as u128);
    let fraction = |number: u128| ((number + 1) * size / count - number * size / count) as u64;
    let numbered = row_groups.into_iter().zip(0..);
    let range = |(group, number)| (fraction(number), InputRange::RowGroup(Box::new(group)));
    Ok(numbered.map(range).collect())
}

fn split_at_lines(path: &Path, size: u64) -> Result<Vec<Range<u64>>> {
    let file = File::open(path).map_err(TokenizeError::io(path))?;
    let end = file.metadata().map_err(TokenizeError::io(path))?.len();
    let mut ranges = Vec::new();
    let mut start = 0;
    while start < end {
        let target = start.saturating_add(size.max(1)).min(end);
        let next = line_end(&file, target, end).map_err(TokenizeError::io(path))?;
        ranges.push(start..next);
        start = next;
    }
    Ok(ranges)
}

/// The offset after the first line end at or after `from - 1`, or `end`.
fn line_end(file: &File, from: u64, end: u64) -> std::io::Result<u64> {
    // Include the byte before: if it is a line end, the shard ends exactly at `from`.
    let mut at = from.saturating_sub(1);
    let mut buffer = vec![0; BUFFER];
    while at < end {
        let length = BUFFER.min((end - at) as usize);
        file.read_exact_at(&mut buffer[..length], at)?;
        if let Some(index) = buffer[..length].iter().position(|&byte| byte == b'\n') {
            return Ok(at + index as u64 + 1);
        }
        at += length as u64;
    }
    Ok(end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn small_files_share_a_shard() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let inputs = [
            file("a.md", "1234"),
            file("b.md", "12"),
            file("c.md", "1234567"),
            file("d.jsonl", "{}\n"),
            file("e.md", "1"),
        ];
        let found = input_shards(&inputs, "text", Documents::File, 6).unwrap();
        let num_files: Vec<usize> = found
            .iter()
            .map(|shard| match &shard.range {
                InputRange::Files(files) => files.len(),
                _ => 0,
            })
            .collect();
        assert_eq!(num_files, [2, 1, 0, 1]);
        let names: Vec<&str> = found
            .iter()
            .map(|shard| shard.token_file.as_str())
            .collect();
        assert_eq!(names[3], "00004-00000.bin");
    }

    proptest! {
        /// The shards cover the input without gaps, and each ends at a line end.
        #[test]
        fn every_line_is_in_exactly_one_shard(
            lines in prop::collection::vec("[a-z]{0,20}", 0..40),
            size in 1u64..50,
            ends_in_line in any::<bool>(),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("in.jsonl");
            let mut text = lines.join("\n");
            if ends_in_line && !text.is_empty() {
                text.push('\n');
            }
            std::fs::write(&path, &text).unwrap();
            let found = input_shards(&[path], "text", Documents::Line, size).unwrap();
            let mut expected = 0;
            for shard in &found {
                let InputRange::Lines(bytes) = &shard.range else {
                    panic!("{shard:?}")
                };
                prop_assert_eq!(bytes.start, expected);
                prop_assert!(bytes.start < bytes.end);
                expected = bytes.end;
                let is_line_end = text.as_bytes()[expected as usize - 1] == b'\n';
                prop_assert!(is_line_end || expected == text.len() as u64);
            }
            prop_assert_eq!(expected, text.len() as u64);
        }
    }
}
