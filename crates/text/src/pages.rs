//! The pages of a column, each looked at before it is unpacked.
//!
//! A page says in its header how long it is unpacked, and the `parquet` crate allocates that much before
//! it unpacks anything. Here the header is read first.

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

/// Pages up to this are unpacked, however small they are packed.
const SMALL: u64 = 4 << 20;
/// Larger ones, up to so many times their size: text is packed ten times smaller, not a hundred.
const MAX_RATIO: u64 = 64;
/// A text in a dictionary takes its length, in four bytes, and itself.
const MIN_ENTRY: u64 = 4;

/// The kind of page that the crate passes over.
const INDEX_PAGE: u64 = 1;

/// The pages of one column of one row group, in order.
pub(crate) struct Pages {
    pages: SerializedPageReader<File>,
    file: Arc<File>,
    is_gzip: bool,
    /// Where the next header is.
    at: u64,
    /// Where the column ends.
    end: u64,
}

impl Pages {
    pub(crate) fn new(file: File, column: &ColumnChunkMetaData, num_rows: usize) -> Result<Pages> {
        // One name for several formats, some of which do not say how long they are unpacked.
        if column.compression() == Compression::LZ4 {
            return Err(wrong(
                "it is packed with LZ4 as Hadoop has it: LZ4_RAW is read",
            ));
        }
        let size = file.metadata()?.len();
        let start = column
            .dictionary_page_offset()
            .unwrap_or(column.data_page_offset());
        let end = start
            .checked_add(column.compressed_size())
            .filter(|&end| 0 <= start && start <= end && end as u64 <= size)
            .ok_or_else(|| wrong("its footer puts the column outside of it"))?;
        let file = Arc::new(file);
        Ok(Pages {
            pages: SerializedPageReader::new(file.clone(), column, num_rows, None)?,
            file,
            is_gzip: matches!(column.compression(), Compression::GZIP(_)),
            at: start as u64,
            end: end as u64,
        })
    }

    /// Looks at the page that comes next, and at those before it that the crate passes over.
    fn look(&mut self) -> Result<()> {
        while self.at < self.end {
            let header = Header::read(&self.file, self.at, self.end)?;
            let from = self.at + header.num_bytes;
            self.at = from
                .checked_add(header.packed)
                .filter(|&at| at <= self.end)
                .ok_or_else(|| wrong("a page is longer than its column"))?;
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

    /// The crate unpacks gzip to its end, whatever the header says; so it is unpacked once before, and
    /// thrown away.
    fn check_gzip(&self, from: u64, header: Header) -> Result<()> {
        let packed = At {
            file: &self.file,
            at: from.saturating_add(header.num_level_bytes),
            end: from + header.packed,
        };
        if header.is_plain || packed.at >= packed.end {
            return Ok(());
        }
        let mut unpacked = MultiGzDecoder::new(packed).take(header.unpacked + 1);
        match io::copy(&mut unpacked, &mut io::sink())? <= header.unpacked {
            true => Ok(()),
            false => Err(wrong("a page is longer than its header says")),
        }
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        self.look()?;
        let page = self.pages.get_next_page()?;
        match page.as_ref().map(Page::encoding) {
            // The crate believes the counts in other encodings, and aborts where memory is short.
            None
            | Some(Encoding::PLAIN | Encoding::RLE_DICTIONARY)
            | Some(Encoding::PLAIN_DICTIONARY) => Ok(page),
            Some(other) => Err(wrong(&format!(
                "encoding {other} is not read: write the column as PLAIN, or with a dictionary"
            ))),
        }
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        Err(wrong("pages are read in order"))
    }

    fn skip_next_page(&mut self) -> Result<()> {
        Err(wrong("pages are read in order"))
    }
}

impl Iterator for Pages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Result<Page>> {
        self.get_next_page().transpose()
    }
}

/// What a page says of itself.
#[derive(Clone, Copy, Default)]
struct Header {
    /// Its own length.
    num_bytes: u64,
    packed: u64,
    unpacked: u64,
    is_index: bool,
    /// Entries, if it is a dictionary.
    num_entries: u64,
    /// Bytes before the packed part.
    num_level_bytes: u64,
    /// Whether nothing is packed, whatever the column says.
    is_plain: bool,
}

impl Header {
    fn read(file: &File, at: u64, end: u64) -> Result<Header> {
        let mut reader = Counted {
            reader: BufReader::with_capacity(256, At { file, at, end }),
            num_bytes: 0,
        };
        let mut header = Header::default();
        let mut met: Vec<Vec<i64>> = Vec::new();
        let mut is_wrong = false;
        walk(&mut reader, &mut |path, event| {
            let Event::Number(number) = event else { return };
            if !matches!(path, [1..=3] | [7, 1] | [8, 5..=7]) {
                return;
            }
            // Twice the same would let another size through than the one that was looked at.
            is_wrong |= number < 0 || met.iter().any(|other| other == path);
            if !is_wrong {
                met.push(path.to_vec());
                header.note(path, number as u64);
            }
        })?;
        header.num_bytes = reader.num_bytes;
        let has_sizes = [1, 2, 3].iter().all(|&id| met.contains(&vec![id]));
        match has_sizes && !is_wrong {
            true => Ok(header),
            false => Err(wrong("a page has a header that is none")),
        }
    }

    fn note(&mut self, path: &[i64], number: u64) {
        match path {
            [1] => self.is_index = number == INDEX_PAGE,
            [2] => self.unpacked = number,
            [3] => self.packed = number,
            [7, 1] => self.num_entries = number,
            [8, 5 | 6] => self.num_level_bytes = self.num_level_bytes.saturating_add(number),
            [8, 7] => self.is_plain = number == 0,
            _ => (),
        }
    }

    /// Refuses what would take more memory than a text does.
    fn check(&self) -> Result<()> {
        if self.unpacked > SMALL.max(self.packed.saturating_mul(MAX_RATIO)) {
            return Err(wrong(&format!(
                "a page of {} bytes says that it has {} unpacked: more than {MAX_RATIO} times as many \
                 is not read",
                self.packed, self.unpacked
            )));
        }
        match self.num_entries.saturating_mul(MIN_ENTRY) <= self.unpacked {
            true => Ok(()),
            false => Err(wrong(
                "a dictionary promises more texts than it has room for",
            )),
        }
    }
}

/// A stretch of a file.
struct At<'a> {
    file: &'a File,
    at: u64,
    end: u64,
}

impl Read for At<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let length = (into.len() as u64).min(self.end.saturating_sub(self.at)) as usize;
        let read = self.file.read_at(&mut into[..length], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// How many bytes were taken.
struct Counted<R> {
    reader: R,
    num_bytes: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(into)?;
        self.num_bytes += read as u64;
        Ok(read)
    }
}

fn wrong(reason: &str) -> ParquetError {
    ParquetError::General(reason.to_owned())
}
