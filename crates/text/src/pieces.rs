//! Where inputs are cut: text at the first line end after every so many bytes, Parquet into its row groups.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::row_group::{RowGroup, row_groups};
use crate::{Result, TextError};

/// Bytes of a piece, about.
pub const PIECE: u64 = 16 << 20;
/// Bytes that are looked at together for a line end.
const GLANCE: usize = 64 << 10;

/// Whole documents of an input.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// The input.
    pub path: PathBuf,
    /// Which part of it.
    pub part: Part,
    /// How many of its bytes count as done with this.
    pub num_bytes: u64,
    /// The token file it becomes.
    pub file: String,
}

/// A part of an input.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Whole lines: which bytes.
    Lines(Range<u64>),
    /// A row group of a Parquet file.
    RowGroup(Box<RowGroup>),
}

/// The pieces of all inputs; those of text are of about `size` bytes each. `field` names the column of
/// text in a Parquet file.
pub fn pieces(inputs: &[PathBuf], field: &str, size: u64) -> Result<Vec<Piece>> {
    let mut pieces = Vec::new();
    for (number, path) in inputs.iter().enumerate() {
        let parts = match path.extension().is_some_and(|x| x == "parquet") {
            true => row_group_parts(path, field)?,
            false => line_parts(path, size)?,
        };
        for (part, (num_bytes, which)) in parts.into_iter().enumerate() {
            pieces.push(Piece {
                path: path.clone(),
                part: which,
                num_bytes,
                file: format!("{number:05}-{part:05}.bin"),
            });
        }
    }
    Ok(pieces)
}

fn line_parts(path: &Path, size: u64) -> Result<Vec<(u64, Part)>> {
    let lines = |bytes: Range<u64>| (bytes.end - bytes.start, Part::Lines(bytes));
    Ok(cuts(path, size)?.into_iter().map(lines).collect())
}

/// Row groups are about the same size, so each counts as the same share of the file.
fn row_group_parts(path: &Path, field: &str) -> Result<Vec<(u64, Part)>> {
    let row_groups = row_groups(path, field)?;
    let size = std::fs::metadata(path).map_err(TextError::io(path))?.len();
    let (size, count) = (u128::from(size), row_groups.len() as u128);
    let share = |number: u128| ((number + 1) * size / count - number * size / count) as u64;
    let parts = row_groups.into_iter().zip(0..);
    let part = |(group, number)| (share(number), Part::RowGroup(Box::new(group)));
    Ok(parts.map(part).collect())
}

fn cuts(path: &Path, size: u64) -> Result<Vec<Range<u64>>> {
    let file = File::open(path).map_err(TextError::io(path))?;
    let end = file.metadata().map_err(TextError::io(path))?.len();
    let mut cuts = Vec::new();
    let mut start = 0;
    while start < end {
        let wanted = start.saturating_add(size.max(1)).min(end);
        let cut = line_end(&file, wanted, end).map_err(TextError::io(path))?;
        cuts.push(start..cut);
        start = cut;
    }
    Ok(cuts)
}

/// The place after the first line end from `from` on, or the end.
fn line_end(file: &File, from: u64, end: u64) -> std::io::Result<u64> {
    // A line that ends just before is no longer this piece's to look for.
    let mut at = from.saturating_sub(1);
    let mut glance = vec![0; GLANCE];
    while at < end {
        let length = GLANCE.min((end - at) as usize);
        file.read_exact_at(&mut glance[..length], at)?;
        if let Some(place) = glance[..length].iter().position(|&byte| byte == b'\n') {
            return Ok(at + place as u64 + 1);
        }
        at += length as u64;
    }
    Ok(end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Together the pieces are the input, and each ends where a line does.
        #[test]
        fn every_line_is_in_one_piece(
            lines in prop::collection::vec("[a-z]{0,20}", 0..40),
            size in 1u64..50,
            ends_in_line in any::<bool>(),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("in.jsonl");
            let mut text = lines.join("\n");
            if ends_in_line && !text.is_empty() {
                text.push('\n');
            }
            std::fs::write(&path, &text).unwrap();
            let found = pieces(&[path], "text", size).unwrap();
            let mut expected = 0;
            for piece in &found {
                let Part::Lines(bytes) = &piece.part else {
                    panic!("{piece:?}")
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
