//! A token file as it grows: its tokens go to the disk as they come, and its header is written last.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::put::{partial, publish};
use crate::token_file::{HEADER, Width, header};
use crate::{Result, TextError};

/// A token file that is not whole yet.
pub(crate) struct TokenWriter {
    path: PathBuf,
    file: BufWriter<File>,
    width: Width,
    num_tokens: u64,
    /// Of one document, kept for the next.
    bytes: Vec<u8>,
}

impl TokenWriter {
    /// Begins a file that will be `path`.
    pub(crate) fn create(path: &Path, width: Width) -> Result<TokenWriter> {
        let partial = partial(path);
        let created = File::create(&partial).and_then(|file| {
            let mut file = BufWriter::with_capacity(1 << 20, file);
            file.write_all(&[0; HEADER as usize])?;
            Ok(file)
        });
        Ok(TokenWriter {
            file: created.map_err(TextError::io(&partial))?,
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
        written.map_err(TextError::io(&partial(&self.path)))
    }

    /// Makes it whole, and gives it its name. Returns how many tokens it has.
    pub(crate) fn finish(self) -> Result<u64> {
        let partial = partial(&self.path);
        let head = header(self.width, self.num_tokens);
        let file = self
            .file
            .into_inner()
            .map_err(io::IntoInnerError::into_error);
        let file = file.and_then(|file| file.write_all_at(&head, 0).map(|()| file));
        publish(&file.map_err(TextError::io(&partial))?, &self.path)?;
        Ok(self.num_tokens)
    }
}
