//! The writer of a token file, which streams tokens to the disk and writes the header last.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::token_file::{HEADER_BYTES, Width, header};
use crate::write_atomic::{partial, publish};
use crate::{Result, TokenizeError};

/// A token file that is being written under its temporary name.
pub(crate) struct TokenWriter {
    path: PathBuf,
    file: BufWriter<File>,
    width: Width,
    num_tokens: u64,
    /// The encoded tokens of one document, reused for the next.
    bytes: Vec<u8>,
}

impl TokenWriter {
    /// Begins the token file `path`.
    pub(crate) fn create(path: &Path, width: Width) -> Result<TokenWriter> {
        let partial = partial(path);
        let created = File::create(&partial).and_then(|file| {
            let mut file = BufWriter::with_capacity(1 << 20, file);
            file.write_all(&[0; HEADER_BYTES as usize])?;
            Ok(file)
        });
        Ok(TokenWriter {
            file: created.map_err(TokenizeError::io(&partial))?,
            path: path.to_owned(),
            width,
            num_tokens: 0,
            bytes: Vec::new(),
        })
    }

    /// Appends the tokens of a document.
    pub(crate) fn write(&mut self, tokens: impl Iterator<Item = u32>) -> Result<()> {
        self.bytes.clear();
        tokens.for_each(|token| self.width.encode(token, &mut self.bytes));
        self.num_tokens += self.bytes.len() as u64 / self.width.bytes();
        let written = self.file.write_all(&self.bytes);
        written.map_err(TokenizeError::io(&partial(&self.path)))
    }

    /// Writes the header, renames the file to its final name, and returns the number of tokens.
    pub(crate) fn finish(self) -> Result<u64> {
        let partial = partial(&self.path);
        let head = header(self.width, self.num_tokens);
        let file = self
            .file
            .into_inner()
            .map_err(io::IntoInnerError::into_error);
        let file = file.and_then(|file| file.write_all_at(&head, 0).map(|()| file));
        publish(&file.map_err(TokenizeError::io(&partial))?, &self.path)?;
        Ok(self.num_tokens)
    }
}
