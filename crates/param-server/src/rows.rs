//! The rows of embedding tables that a piece needs.
//!
//! A lookup reads the rows of its tokens only, and only they have a gradient. So a worker pulls and pushes these rows of a table, and
//! all other parameters whole. The order of the rows on the wire follows from the shard and the rows alone.

use std::ops::Range;

use crate::protocol::{ParamShard, Table};

/// The numbers of rows, ascending. They are the same for all tables; a table has no rows beyond its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rows(Vec<u32>);

/// A part of a parameter that is transferred.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Consecutive elements of the flattened parameter.
    Elements(Range<usize>),
    /// Elements of some rows.
    Rows(RowBlock),
}

/// Rows of a table, of all of which a server holds the same columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowBlock {
    /// The numbers of the rows, ascending.
    pub rows: Vec<u32>,
    /// The columns.
    pub columns: Range<usize>,
    /// The elements of a whole row.
    pub width: usize,
}

impl Part {
    /// The number of elements.
    pub fn num_elements(&self) -> usize {
        match self {
            Part::Elements(elements) => elements.len(),
            Part::Rows(block) => block.rows.len() * block.columns.len(),
        }
    }

    /// The elements in the order of the transfer, as intervals of the flattened parameter.
    fn intervals(&self) -> Vec<Range<usize>> {
        match self {
            Part::Elements(elements) => vec![elements.clone()],
            Part::Rows(RowBlock {
                rows,
                columns,
                width,
            }) => {
                let starts = rows.iter().map(|&row| row as usize * width + columns.start);
                starts.map(|start| start..start + columns.len()).collect()
            }
        }
    }
}

impl Rows {
    /// These rows below `max_rows`, each once.
    pub fn new(numbers: impl IntoIterator<Item = i64>, max_rows: usize) -> Rows {
        let numbers = numbers.into_iter();
        let rows = numbers.filter_map(|row| u32::try_from(row).ok());
        let mut rows: Vec<u32> = rows.filter(|&row| (row as usize) < max_rows).collect();
        rows.sort_unstable();
        rows.dedup();
        Rows(rows)
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The bytes of the numbers on the wire.
    pub fn num_bytes(num_rows: usize) -> usize {
        num_rows * size_of::<u32>()
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|row| row.to_le_bytes()).collect()
    }

    /// The rows that these bytes are; `None` if they do not ascend.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Rows> {
        let (rows, []) = bytes.as_chunks() else {
            return None;
        };
        let rows: Vec<u32> = rows.iter().map(|&row| u32::from_le_bytes(row)).collect();
        rows.is_sorted_by(|one, other| one < other)
            .then_some(Rows(rows))
    }

    fn within(&self, numbers: Range<usize>) -> Vec<u32> {
        let place = |number: usize| self.0.partition_point(|&row| (row as usize) < number);
        self.0[place(numbers.start)..place(numbers.end)].to_vec()
    }
}

impl ParamShard {
    /// What is transferred of this shard, in this order: of a table these rows, of other parameters everything.
    pub fn parts(&self, rows: &Rows) -> Vec<Part> {
        let elements = self.elements.iter().cloned();
        match self.table {
            None => elements.map(Part::Elements).collect(),
            Some(Table { width, .. }) => {
                let blocks = elements.flat_map(|elements| blocks(elements, rows, width.get()));
                blocks.map(Part::Rows).collect()
            }
        }
    }

    /// The bytes that are transferred of this shard.
    pub fn num_transferred_bytes(&self, rows: &Rows) -> usize {
        let parts = self.parts(rows);
        parts.iter().map(Part::num_elements).sum::<usize>() * self.element_bytes
    }

    /// Where the transferred bytes lie in those of the shard, in the order of the transfer.
    fn transferred(&self, rows: &Rows) -> Vec<Range<usize>> {
        let parts = self.parts(rows);
        let intervals = parts.iter().flat_map(Part::intervals);
        let bytes_of = |elements: Range<usize>| {
            let start = self.place_of(elements.start) * self.element_bytes;
            start..start + elements.len() * self.element_bytes
        };
        intervals.map(bytes_of).collect()
    }

    /// The number of the shard's elements before this one of the parameter.
    fn place_of(&self, element: usize) -> usize {
        let before = self.elements.iter();
        before
            .map(|interval| element.clamp(interval.start, interval.end) - interval.start)
            .sum()
    }
}

/// The elements of some rows in an interval of a flattened table, which may begin and end within a row.
fn blocks(elements: Range<usize>, rows: &Rows, width: usize) -> Vec<RowBlock> {
    let (first, last) = (elements.start / width, elements.end / width);
    let (before, after) = (elements.start % width, elements.end % width);
    let pieces = if first == last {
        vec![(first..first + 1, before..after)]
    } else {
        let first_whole = if before > 0 { first + 1 } else { first };
        vec![
            (first..first_whole, before..width),
            (first_whole..last, 0..width),
            (last..last + 1, 0..after),
        ]
    };
    let blocks = pieces.into_iter().map(|(numbers, columns)| RowBlock {
        rows: rows.within(numbers),
        columns,
        width,
    });
    blocks
        .filter(|block| !block.rows.is_empty() && !block.columns.is_empty())
        .collect()
}

/// Where the transferred bytes lie in those of some shards, one after the other, in the order of the transfer.
pub(crate) fn transferred<'a>(
    shards: impl Iterator<Item = &'a ParamShard>,
    rows: &Rows,
) -> Vec<Range<usize>> {
    let mut first = 0;
    let mut intervals = Vec::new();
    for shard in shards {
        let own = shard.transferred(rows).into_iter();
        intervals.extend(own.map(|bytes| first + bytes.start..first + bytes.end));
        first += shard.num_bytes();
    }
    intervals
}

/// All bytes of some shards, of which those of these intervals were transferred; the others are zero.
pub(crate) fn scatter(intervals: &[Range<usize>], transferred: &[u8], num_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; num_bytes];
    let mut read = 0;
    for interval in intervals {
        let from = read..read + interval.len();
        read = from.end;
        bytes[interval.clone()].copy_from_slice(&transferred[from]);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use proptest::prelude::*;

    use super::*;

    /// The shards of a table of `num_rows` rows of `width` bytes, cut at `cuts`, as a server each.
    fn servers(num_rows: usize, width: usize, mut cuts: Vec<usize>) -> Vec<ParamShard> {
        cuts.sort_unstable();
        let ends = cuts.iter().copied().chain([num_rows * width]);
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let shard = |(start, end)| ParamShard {
            name: "table".to_owned(),
            elements: std::iter::once(start..end).collect(),
            element_bytes: 1,
            is_trainable: true,
            table: NonZero::new(width).map(|width| Table {
                height: num_rows,
                width,
            }),
        };
        starts.zip(ends).map(shard).collect()
    }

    fn tables() -> impl Strategy<Value = (usize, usize, Vec<usize>, Vec<i64>)> {
        (1..12_usize, 1..6_usize).prop_flat_map(|(num_rows, width)| {
            let cuts = proptest::collection::vec(0..=num_rows * width, 0..4);
            let rows = proptest::collection::vec(-1..num_rows as i64 + 3, 0..20);
            (Just(num_rows), Just(width), cuts, rows)
        })
    }

    proptest! {
        /// Whatever the shards are, servers together transfer the rows that were asked for, and nothing else.
        #[test]
        fn rows_are_transferred_whole((num_rows, width, cuts, numbers) in tables()) {
            let rows = Rows::new(numbers.iter().copied(), num_rows);
            let table: Vec<u8> = (0..num_rows * width).map(|element| element as u8 + 1).collect();
            let mut found = Vec::new();
            for shard in servers(num_rows, width, cuts) {
                let own = &table[shard.elements[0].clone()];
                let intervals = transferred([&shard].into_iter(), &rows);
                let sent: Vec<u8> = intervals.iter().flat_map(|interval| own[interval.clone()].to_vec()).collect();
                prop_assert_eq!(sent.len(), shard.num_transferred_bytes(&rows));
                found.extend(scatter(&intervals, &sent, own.len()));
            }
            let is_wanted = |element: usize| numbers.contains(&((element / width) as i64));
            let wanted = table.iter().enumerate();
            let wanted: Vec<u8> = wanted.map(|(at, &value)| if is_wanted(at) { value } else { 0 }).collect();
            prop_assert_eq!(found, wanted);
        }

        #[test]
        fn rows_survive_the_wire(numbers in proptest::collection::vec(-1..1_i64 << 21, 0..20)) {
            let rows = Rows::new(numbers, 1 << 20);
            prop_assert_eq!(rows.to_bytes().len(), Rows::num_bytes(rows.len()));
            prop_assert_eq!(Rows::from_bytes(&rows.to_bytes()), Some(rows));
        }
    }

    #[test]
    fn bytes_that_are_no_rows_are_rejected() {
        assert_eq!(Rows::from_bytes(&[1, 0, 0, 0, 1, 0, 0, 0]), None);
        assert_eq!(Rows::from_bytes(&[1, 0, 0]), None);
    }

    #[test]
    fn parameters_that_are_no_tables_are_transferred_whole() {
        let mut shards = servers(4, 2, vec![3]);
        shards[1].table = None;
        let rows = Rows::new([0], 4);
        assert_eq!(shards[0].num_transferred_bytes(&rows), 2);
        assert_eq!(shards[1].num_transferred_bytes(&rows), 5);
    }
}
