//! The pages of a column, whose headers are validated before decompression.
//!
//! The header of a page states its decompressed size, and the `parquet` crate allocates that much before it
//! decompresses anything. So this module reads and validates the header first.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use flate2::read::MultiGzDecoder;
use parquet::basic::{Compression, Encoding};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::serialized_reader::SerializedPageReader;

use crate::thrift::{Event, walk};

/// Pages of at most this decompressed size are accepted at any compression ratio.
const SMALL: u64 = 4 << 20;
/// The highest accepted compression ratio of larger pages: text compresses about ten times, not a hundred.
const MAX_RATIO: u64 = 64;
/// A lower bound of the size of a dictionary entry in bytes: its length takes four.
const MIN_ENTRY: u64 = 4;

/// The page type that the `parquet` crate skips.
const INDEX_PAGE: u64 = 1;

/// The pages of one column of one row group, in order.
pub(crate) struct Pages {
    pages: SerializedPageReader<File>,
    file: Arc<File>,
    is_gzip: bool,
    /// The offset of the next page header.
    at: u64,
    /// The offset of the end of the column.
    end: u64,
}

impl Pages {
    pub(crate) fn new(file: File, column: &ColumnChunkMetaData, num_rows: usize) -> Result<Pages> {
        // This codec stands for several formats, some of which do not state the decompressed size.
        if column.compression() == Compression::LZ4 {
            return Err(invalid(
                "the codec LZ4 (Hadoop) is not supported: write the file with LZ4_RAW or another codec",
            ));
        }
        let size = file.metadata()?.len();
        let start = column
            .dictionary_page_offset()
            .unwrap_or(column.data_page_offset());
        let end = start
            .checked_add(column.compressed_size())
            .filter(|&end| 0 <= start && start <= end && end as u64 <= size)
            .ok_or_else(|| invalid("its footer places the column outside of the file"))?;
        let file = Arc::new(file);
        Ok(Pages {
            pages: SerializedPageReader::new(file.clone(), column, num_rows, None)?,
            file,
            is_gzip: matches!(column.compression(), Compression::GZIP(_)),
            at: start as u64,
            end: end as u64,
        })
    }

    /// Validates the header of the next page, and of index pages before it, which the `parquet` crate skips.
    fn check_next(&mut self) -> Result<()> {
        while self.at < self.end {
            let header = Header::read(&self.file, self.at, self.end)?;
            let from = self.at + header.num_bytes;
            self.at = from
                .checked_add(header.compressed)
                .filter(|&at| at <= self.end)
                .ok_or_else(|| invalid("a page is longer than its column"))?;
            header.check()?;
            if self.is_gzip {
                self.check_gzip(from, header)?;
            }
            if !header.is_index {
                break;
            }
        }
        Ok(())
    }

    /// Decompresses a gzip page once and discards the output, because the `parquet` crate decompresses to the
    /// end of the stream regardless of the size in the header.
    fn check_gzip(&self, from: u64, header: Header) -> Result<()> {
        let compressed = FileRange {
            file: &self.file,
            at: from.saturating_add(header.num_level_bytes),
            end: from + header.compressed,
        };
        if header.is_uncompressed || compressed.at >= compressed.end {
            return Ok(());
        }
        let mut decompressed = MultiGzDecoder::new(compressed).take(header.decompressed + 1);
        if io::copy(&mut decompressed, &mut io::sink())? <= header.decompressed {
            Ok(())
        } else {
            Err(invalid("a page is longer than its header states"))
        }
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        self.check_next()?;
        let page = self.pages.get_next_page()?;
        match page.as_ref().map(Page::encoding) {
            // With other encodings the crate trusts the counts in the page, and aborts when memory is short.
            None
            | Some(Encoding::PLAIN | Encoding::RLE_DICTIONARY)
            | Some(Encoding::PLAIN_DICTIONARY) => Ok(page),
            Some(other) => Err(invalid(&format!(
                "encoding {other} is not supported: write the column as PLAIN, or with a dictionary"
            ))),
        }
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        Err(invalid("pages are read in order"))
    }

    fn skip_next_page(&mut self) -> Result<()> {
        Err(invalid("pages are read in order"))
    }
}

impl Iterator for Pages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Result<Page>> {
        self.get_next_page().transpose()
    }
}

/// The header of a page.
#[derive(Clone, Copy, Default)]
struct Header {
    /// The length of the header in bytes.
    num_bytes: u64,
    /// The size of the page in the file, in bytes.
    compressed: u64,
    /// The size of the page after decompression, in bytes.
    decompressed: u64,
    is_index: bool,
    /// The number of entries, for a dictionary page.
    num_entries: u64,
    /// The size of the levels before the compressed values, in bytes.
    num_level_bytes: u64,
    /// Whether the page is not compressed, regardless of the column's codec.
    is_uncompressed: bool,
}

impl Header {
    fn read(file: &File, at: u64, end: u64) -> Result<Header> {
        let mut reader = CountingReader {
            reader: BufReader::with_capacity(256, FileRange { file, at, end }),
            num_bytes: 0,
        };
        let mut header = Header::default();
        let mut fields: Vec<Vec<i64>> = Vec::new();
        let mut is_invalid = false;
        walk(&mut reader, &mut |path, event| {
            let Event::Number(number) = event else { return };
            if !matches!(path, [1..=3] | [7, 1] | [8, 5..=7]) {
                return;
            }
            // A field that occurs twice could give the crate another size than the one validated here.
            is_invalid |= number < 0 || fields.iter().any(|other| other == path);
            if !is_invalid {
                fields.push(path.to_vec());
                header.set(path, number as u64);
            }
        })?;
        header.num_bytes = reader.num_bytes;
        let has_sizes = [1, 2, 3].iter().all(|&id| fields.contains(&vec![id]));
        if has_sizes && !is_invalid {
            Ok(header)
        } else {
            Err(invalid("a page has an invalid header"))
        }
    }

    fn set(&mut self, path: &[i64], number: u64) {
        match path {
            [1] => self.is_index = number == INDEX_PAGE,
            [2] => self.decompressed = number,
            [3] => self.compressed = number,
            [7, 1] => self.num_entries = number,
            [8, 5 | 6] => self.num_level_bytes = self.num_level_bytes.saturating_add(number),
            [8, 7] => self.is_uncompressed = number == 0,
            _ => (),
        }
    }

    /// Rejects a page that would take more memory than text plausibly does.
    fn check(&self) -> Result<()> {
        if self.decompressed > SMALL.max(self.compressed.saturating_mul(MAX_RATIO)) {
            return Err(invalid(&format!(
                "a page of {} bytes states a decompressed size of {} bytes: ratios above {MAX_RATIO} times \
                 are rejected",
                self.compressed, self.decompressed
            )));
        }
        if self.num_entries.saturating_mul(MIN_ENTRY) <= self.decompressed {
            Ok(())
        } else {
            Err(invalid(
                "a dictionary declares more entries than its page can hold",
            ))
        }
    }
}

/// A reader of a byte range of a file.
struct FileRange<'a> {
    file: &'a File,
    at: u64,
    end: u64,
}

impl Read for FileRange<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let length = (into.len() as u64).min(self.end.saturating_sub(self.at)) as usize;
        let read = self.file.read_at(&mut into[..length], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// A reader that counts the bytes read.
struct CountingReader<R> {
    reader: R,
    num_bytes: u64,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(into)?;
        self.num_bytes += read as u64;
        Ok(read)
    }
}

fn invalid(reason: &str) -> ParquetError {
    ParquetError::General(reason.to_owned())
}
