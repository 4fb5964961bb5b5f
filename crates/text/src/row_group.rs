//! Parquet files: a row group is a piece, and a row of one column a document.

use std::fs::File;
use std::path::Path;

use parquet::basic::{ConvertedType, Type};
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};

use crate::caught::caught;
use crate::footer::read_footer;
use crate::pages::Pages;
use crate::{Result, TextError};

/// Rows that are in memory together, besides the page they are in.
const BATCH: usize = 1024;

/// The column of text in one row group of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct RowGroup {
    number: usize,
    num_rows: usize,
    column: ColumnChunkMetaData,
}

/// The row groups of a file, with the column that `field` names.
pub fn row_groups(path: &Path, field: &str) -> Result<Vec<RowGroup>> {
    let wrong = |reason| TextError::Parquet {
        path: path.to_owned(),
        reason,
    };
    let file = File::open(path).map_err(TextError::io(path))?;
    let footer = read_footer(&file).map_err(wrong)?;
    let index = text_column(&footer, field).map_err(wrong)?;
    let row_group = |number| {
        let found = footer.row_group(number);
        let num_rows = usize::try_from(found.num_rows());
        let num_rows = num_rows.map_err(|_| "a row group has fewer rows than none".to_owned())?;
        let column = found.columns().get(index).ok_or("a row group lacks it")?;
        Ok(RowGroup {
            number,
            num_rows,
            column: column.clone(),
        })
    };
    let found: Result<_, String> = (0..footer.num_row_groups()).map(row_group).collect();
    found.map_err(wrong)
}

/// Which column it is, if it is text, one per row.
fn text_column(footer: &ParquetMetaData, field: &str) -> Result<usize, String> {
    let columns = footer.file_metadata().schema_descr().columns();
    let index = columns.iter().position(|c| c.path().string() == field);
    let missing = || format!("there is no column {field:?}: name the column with --field");
    let index = index.ok_or_else(missing)?;
    let column = &columns[index];
    let is_bytes = column.physical_type() == Type::BYTE_ARRAY;
    // Old writers do not say that bytes are text; whether they are is seen when they are read.
    let is_text = matches!(
        column.converted_type(),
        ConvertedType::NONE | ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON
    );
    match is_bytes && is_text && column.max_rep_level() == 0 {
        true => Ok(index),
        false => Err(format!(
            "column {field:?} is no text: name another with --field"
        )),
    }
}

impl RowGroup {
    /// Calls `each` with every text of the row group, in order. Rows without one are passed over.
    pub fn for_each_document(
        &self,
        path: &Path,
        mut each: impl FnMut(&str) -> Result<(), String>,
    ) -> Result<()> {
        let wrong = |reason| TextError::Parquet {
            path: path.to_owned(),
            reason: format!("row group {}: {reason}", self.number),
        };
        let file = File::open(path).map_err(TextError::io(path))?;
        let mut rows = Rows::open(file, self).map_err(wrong)?;
        while rows.read().map_err(wrong)? {
            for text in &rows.texts {
                let text = str::from_utf8(text.data()).map_err(|e| format!("not UTF-8: {e}"));
                text.and_then(&mut each).map_err(wrong)?;
            }
        }
        match rows.num_read == self.num_rows {
            true => Ok(()),
            false => Err(wrong(format!(
                "{} rows were promised, but {} are there",
                self.num_rows, rows.num_read
            ))),
        }
    }
}

/// A row group as it is read.
struct Rows {
    reader: ColumnReaderImpl<ByteArrayType>,
    num_rows: usize,
    num_read: usize,
    /// Which rows have a text; the crate wants to say so.
    levels: Vec<i16>,
    texts: Vec<ByteArray>,
}

impl Rows {
    fn open(file: File, row_group: &RowGroup) -> Result<Rows, String> {
        let RowGroup {
            column, num_rows, ..
        } = row_group;
        let pages = caught(|| Pages::new(file, column, *num_rows))?;
        let reader = ColumnReaderImpl::new(column.column_descr_ptr(), Box::new(pages));
        Ok(Rows {
            reader,
            num_rows: *num_rows,
            num_read: 0,
            levels: Vec::new(),
            texts: Vec::new(),
        })
    }

    /// Reads the next rows; false where there are none, or more than were promised.
    fn read(&mut self) -> Result<bool, String> {
        self.levels.clear();
        self.texts.clear();
        if self.num_read > self.num_rows {
            return Ok(false);
        }
        let (reader, levels, texts) = (&mut self.reader, &mut self.levels, &mut self.texts);
        let (num_rows, ..) = caught(|| reader.read_records(BATCH, Some(levels), None, texts))?;
        self.num_read += num_rows;
        Ok(num_rows > 0)
    }
}
