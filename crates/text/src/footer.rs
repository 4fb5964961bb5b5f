//! What a Parquet file says at its end: its columns, and where their pages lie.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use parquet::file::metadata::{
    ParquetMetaData, ParquetMetaDataOptions, ParquetMetaDataReader, ParquetStatisticsPolicy,
};

use crate::caught::caught;
use crate::thrift::{Event, walk};

/// The footer's own length, and `PAR1`.
const TAIL: u64 = 8;
/// No honest footer is larger.
const MAX_FOOTER: u64 = 64 << 20;
/// No honest schema goes deeper.
const MAX_SCHEMA_DEPTH: usize = 64;
/// A row group takes more bytes than this, for its one column at least has a name, a place and two sizes.
const MIN_ROW_GROUP: u64 = 32;

/// Paths in the footer, by the numbers of fields.
const SCHEMA: &[i64] = &[2];
const NUM_CHILDREN: &[i64] = &[2, 5];
const ROW_GROUPS: &[i64] = &[4];

/// The footer, or why there is none.
pub(crate) fn read_footer(file: &File) -> Result<ParquetMetaData, String> {
    check(file)?;
    // Smallest and largest values are of no use here, and may be as long as documents.
    let options = ParquetMetaDataOptions::new()
        .with_column_stats_policy(ParquetStatisticsPolicy::SkipAll)
        .with_size_stats_policy(ParquetStatisticsPolicy::SkipAll);
    let reader = ParquetMetaDataReader::new().with_metadata_options(Some(options));
    caught(|| reader.parse_and_finish(file))
}

/// Refuses a footer that would take more memory, or a deeper stack, than it is worth.
fn check(file: &File) -> Result<(), String> {
    let told = |error: io::Error| format!("its footer cannot be read: {error}");
    let size = file.metadata().map_err(told)?.len();
    let mut tail = [0; TAIL as usize];
    if size < TAIL {
        return Err("too short for a Parquet file".into());
    }
    file.read_exact_at(&mut tail, size - TAIL).map_err(told)?;
    let [a, b, c, d, magic @ ..] = tail;
    if magic == *b"PARE" {
        return Err("it is encrypted, which is not built".into());
    }
    if magic != *b"PAR1" {
        return Err("not a Parquet file: it does not end in PAR1. Was it cut off?".into());
    }
    let length = u64::from(u32::from_le_bytes([a, b, c, d]));
    if length > MAX_FOOTER || length > size - TAIL {
        return Err(format!(
            "its footer of {length} bytes is longer than it may be"
        ));
    }
    let mut footer = vec![0; length as usize];
    let start = size - TAIL - length;
    file.read_exact_at(&mut footer, start).map_err(told)?;
    let mut schema = Schema::default();
    let mut num_row_groups = 0;
    let walked = walk(&mut footer.as_slice(), &mut |path, event| match event {
        Event::Number(number) if path == NUM_CHILDREN => schema.num_children = number,
        Event::End if path == SCHEMA => schema.element(),
        Event::End if path == ROW_GROUPS => num_row_groups += 1,
        _ => (),
    });
    walked.map_err(told)?;
    if !schema.is_whole() {
        return Err("its schema promises other columns than there are, or nests too deeply".into());
    }
    match num_row_groups * MIN_ROW_GROUP <= length {
        true => Ok(()),
        false => Err("its footer is too short for its row groups".into()),
    }
}

/// A schema as it goes by: elements in the order of a walk over the tree, each with how many children
/// follow.
#[derive(Default)]
struct Schema {
    /// Of the element that goes by.
    num_children: i64,
    /// How many children of each group on the way here are yet to come.
    open: Vec<i64>,
    num_elements: usize,
    is_wrong: bool,
}

impl Schema {
    fn element(&mut self) {
        let num_children = std::mem::take(&mut self.num_children);
        let is_root = self.num_elements == 0;
        self.num_elements += 1;
        match self.open.last_mut() {
            Some(left) => *left -= 1,
            None => self.is_wrong |= !is_root,
        }
        if num_children > 0 {
            self.open.push(num_children);
        }
        self.is_wrong |= self.open.len() > MAX_SCHEMA_DEPTH || num_children < 0;
        // What is too deep is refused in the end, and must not grow until then.
        self.open.truncate(MAX_SCHEMA_DEPTH);
        while self.open.last() == Some(&0) {
            self.open.pop();
        }
    }

    /// Whether all that was promised came, which bounds every count by the number of elements.
    fn is_whole(&self) -> bool {
        !self.is_wrong && self.open.is_empty()
    }
}
