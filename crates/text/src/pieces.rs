//! Where inputs are cut: at the first line end after every so many bytes.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::{Result, TextError};

/// Bytes of a piece, about.
pub const PIECE: u64 = 16 << 20;
/// Bytes that are looked at together for a line end.
const GLANCE: usize = 64 << 10;

/// Whole lines of an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The input.
    pub path: PathBuf,
    /// Which bytes of it.
    pub bytes: Range<u64>,
    /// The token file it becomes.
    pub file: String,
}

/// The pieces of all inputs, each of about `size` bytes.
pub fn pieces(inputs: &[PathBuf], size: u64) -> Result<Vec<Piece>> {
    let mut pieces = Vec::new();
    for (number, path) in inputs.iter().enumerate() {
        for (part, bytes) in cuts(path, size)?.into_iter().enumerate() {
            pieces.push(Piece {
                path: path.clone(),
                bytes,
                file: format!("{number:05}-{part:05}.bin"),
            });
        }
    }
    Ok(pieces)
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
            let found = pieces(&[path], size).unwrap();
            let mut expected = 0;
            for piece in &found {
                prop_assert_eq!(piece.bytes.start, expected);
                prop_assert!(piece.bytes.start < piece.bytes.end);
                expected = piece.bytes.end;
                let is_line_end = text.as_bytes()[expected as usize - 1] == b'\n';
                prop_assert!(is_line_end || expected == text.len() as u64);
            }
            prop_assert_eq!(expected, text.len() as u64);
        }
    }
}
