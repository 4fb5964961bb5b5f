//! Row groups of Parquet files: every row of the text column is a document.

use std::fs::File;
use std::path::Path;

use parquet::basic::{ConvertedType, Type};
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};

use crate::catch_panic::catch_panic;
use crate::footer::read_footer;
use crate::pages::Pages;
use crate::{Result, TokenizeError};

/// The number of rows that are decoded at a time.
const BATCH: usize = 1024;

/// The text column of one row group of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct RowGroup {
    number: usize,
    num_rows: usize,
    column: ColumnChunkMetaData,
}

/// The row groups of a file; `field` is the path of the text column.
pub fn row_groups(path: &Path, field: &str) -> Result<Vec<RowGroup>> {
    let invalid = |reason| TokenizeError::Parquet {
        path: path.to_owned(),
        reason,
    };
    let file = File::open(path).map_err(TokenizeError::io(path))?;
    let footer = read_footer(&file).map_err(invalid)?;
    let index = text_column(&footer, field).map_err(invalid)?;
    let row_group = |number| {
        let found = footer.row_group(number);
        let num_rows = usize::try_from(found.num_rows());
        let num_rows =
            num_rows.map_err(|_| "a row group has a negative number of rows".to_owned())?;
        let column = found.columns().get(index);
        let column = column.ok_or("a row group lacks the text column")?;
        Ok(RowGroup {
            number,
            num_rows,
            column: column.clone(),
        })
    };
    let found: Result<_, String> = (0..footer.num_row_groups()).map(row_group).collect();
    found.map_err(invalid)
}

/// The index of the text column, which must have one string per row.
fn text_column(footer: &ParquetMetaData, field: &str) -> Result<usize, String> {
    let columns = footer.file_metadata().schema_descr().columns();
    let index = columns.iter().position(|c| c.path().string() == field);
    let missing = || format!("the file has no column {field:?}: name the column with --field");
    let index = index.ok_or_else(missing)?;
    let column = &columns[index];
    let is_bytes = column.physical_type() == Type::BYTE_ARRAY;
    // Old writers do not annotate strings; reading the column checks that its bytes are UTF-8.
    let is_text = matches!(
        column.converted_type(),
        ConvertedType::NONE | ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON
    );
    if is_bytes && is_text && column.max_rep_level() == 0 {
        Ok(index)
    } else {
        Err(format!(
            "column {field:?} is not a string column: name another with --field"
        ))
    }
}

impl RowGroup {
    /// Calls `each` with the text of every row, in order. Skips null rows.
    pub fn for_each_document(
        &self,
        path: &Path,
        mut each: impl FnMut(&str) -> Result<(), String>,
    ) -> Result<()> {
        let invalid = |reason| TokenizeError::Parquet {
            path: path.to_owned(),
            reason: format!("row group {}: {reason}", self.number),
        };
        let file = File::open(path).map_err(TokenizeError::io(path))?;
        let mut rows = Rows::open(file, self).map_err(invalid)?;
        while rows.read().map_err(invalid)? {
            for text in &rows.texts {
                let text = str::from_utf8(text.data()).map_err(|e| format!("not UTF-8: {e}"));
                text.and_then(&mut each).map_err(invalid)?;
            }
        }
        if rows.num_read == self.num_rows {
            Ok(())
        } else {
            Err(invalid(format!(
                "the footer declares {} rows, but the column has {}",
                self.num_rows, rows.num_read
            )))
        }
    }
}

/// A reader of the rows of a row group.
struct Rows {
    reader: ColumnReaderImpl<ByteArrayType>,
    num_rows: usize,
    num_read: usize,
    /// The definition levels, which mark null rows; the `parquet` crate requires the buffer.
    levels: Vec<i16>,
    texts: Vec<ByteArray>,
}

impl Rows {
    fn open(file: File, row_group: &RowGroup) -> Result<Rows, String> {
        let RowGroup {
            column, num_rows, ..
        } = row_group;
        let pages = catch_panic(|| Pages::new(file, column, *num_rows))?;
        let reader = ColumnReaderImpl::new(column.column_descr_ptr(), Box::new(pages));
        Ok(Rows {
            reader,
            num_rows: *num_rows,
            num_read: 0,
            levels: Vec::new(),
            texts: Vec::new(),
        })
    }

    /// Reads the next rows. Returns false at the end, or after more rows than the footer declares.
    fn read(&mut self) -> Result<bool, String> {
        self.levels.clear();
        self.texts.clear();
        if self.num_read > self.num_rows {
            return Ok(false);
        }
        let (reader, levels, texts) = (&mut self.reader, &mut self.levels, &mut self.texts);
        let (num_rows, ..) = catch_panic(|| reader.read_records(BATCH, Some(levels), None, texts))?;
        self.num_read += num_rows;
        Ok(num_rows > 0)
    }
}
