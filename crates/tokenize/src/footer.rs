//! The footer of a Parquet file: its columns and the location of their pages.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use parquet::file::metadata::{
    ParquetMetaData, ParquetMetaDataOptions, ParquetMetaDataReader, ParquetStatisticsPolicy,
};

use crate::catch_panic::catch_panic;
use crate::thrift::{Event, walk};

/// The size of the length of the footer and the magic `PAR1` at the end of the file, in bytes.
const TAIL: u64 = 8;
/// The largest accepted footer, in bytes.
const MAX_FOOTER: u64 = 64 << 20;
/// The deepest accepted schema.
const MAX_SCHEMA_DEPTH: usize = 64;
/// A lower bound of the size of a row group's metadata in bytes: a column has a name, an offset and two sizes.
const MIN_ROW_GROUP: u64 = 32;

/// Paths of Thrift field numbers in the footer.
const SCHEMA: &[i64] = &[2];
const NUM_CHILDREN: &[i64] = &[2, 5];
const ROW_GROUPS: &[i64] = &[4];

/// Reads the footer, after validating it.
pub(crate) fn read_footer(file: &File) -> Result<ParquetMetaData, String> {
    check(file)?;
    // Skip the statistics: minimum and maximum values are unused and can be as long as documents.
    let options = ParquetMetaDataOptions::new()
        .with_column_stats_policy(ParquetStatisticsPolicy::SkipAll)
        .with_size_stats_policy(ParquetStatisticsPolicy::SkipAll);
    let reader = ParquetMetaDataReader::new().with_metadata_options(Some(options));
    catch_panic(|| reader.parse_and_finish(file))
}

/// Rejects a footer for which the `parquet` crate would allocate too much memory or recurse too deeply.
fn check(file: &File) -> Result<(), String> {
    let unreadable = |error: io::Error| format!("its footer cannot be read: {error}");
    let size = file.metadata().map_err(unreadable)?.len();
    let mut tail = [0; TAIL as usize];
    if size < TAIL {
        return Err("too short for a Parquet file".into());
    }
    file.read_exact_at(&mut tail, size - TAIL)
        .map_err(unreadable)?;
    let [a, b, c, d, magic @ ..] = tail;
    if magic == *b"PARE" {
        return Err("encrypted Parquet files are not supported".into());
    }
    if magic != *b"PAR1" {
        return Err("not a Parquet file, or truncated: it does not end in PAR1".into());
    }
    let length = u64::from(u32::from_le_bytes([a, b, c, d]));
    if length > MAX_FOOTER || length > size - TAIL {
        return Err(format!(
            "its footer of {length} bytes is longer than the file or than 64 MiB"
        ));
    }
    let mut footer = vec![0; length as usize];
    let start = size - TAIL - length;
    file.read_exact_at(&mut footer, start).map_err(unreadable)?;
    let mut schema = Schema::default();
    let mut num_row_groups = 0;
    let walked = walk(&mut footer.as_slice(), &mut |path, event| match event {
        Event::Number(number) if path == NUM_CHILDREN => schema.num_children = number,
        Event::End if path == SCHEMA => schema.element(),
        Event::End if path == ROW_GROUPS => num_row_groups += 1,
        _ => (),
    });
    walked.map_err(unreadable)?;
    if !schema.is_valid() {
        return Err(
            "its schema declares more or fewer columns than it has, or nests too deeply".into(),
        );
    }
    if num_row_groups * MIN_ROW_GROUP <= length {
        Ok(())
    } else {
        Err("its footer is too short for its row groups".into())
    }
}

/// Validation state of a schema, whose elements come in depth-first order, each with its number of children.
#[derive(Default)]
struct Schema {
    /// The number of children of the current element.
    num_children: i64,
    /// For every enclosing group, the number of children that are still missing.
    open: Vec<i64>,
    num_elements: usize,
    is_invalid: bool,
}

impl Schema {
    fn element(&mut self) {
        let num_children = std::mem::take(&mut self.num_children);
        let is_root = self.num_elements == 0;
        self.num_elements += 1;
        match self.open.last_mut() {
            Some(left) => *left -= 1,
            None => self.is_invalid |= !is_root,
        }
        if num_children > 0 {
            self.open.push(num_children);
        }
        self.is_invalid |= self.open.len() > MAX_SCHEMA_DEPTH || num_children < 0;
        // A schema that is too deep is rejected at the end; bound the memory until then.
        self.open.truncate(MAX_SCHEMA_DEPTH);
        while self.open.last() == Some(&0) {
            self.open.pop();
        }
    }

    /// Whether every group has its declared children, which bounds every count by the number of elements.
    fn is_valid(&self) -> bool {
        !self.is_invalid && self.open.is_empty()
    }
}
