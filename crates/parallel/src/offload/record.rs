//! What a record holds, and where it lies in the file.

use tch::Kind;

/// Records begin on pages, so that no write of one touches another's.
const PAGE: u64 = 4096;
/// Parts begin where vector instructions like it; also a multiple of every element's size.
const ALIGNMENT: usize = 64;

/// A run of elements of one kind: one flat tensor of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Of the elements.
    pub kind: Kind,
    /// How many.
    pub num_elements: usize,
}

impl Part {
    /// Bytes of its elements.
    pub fn num_bytes(&self) -> usize {
        self.num_elements * self.kind.elt_size_in_bytes()
    }
}

/// What is read and written together: flat tensors, one after another.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    /// The tensors, in the order they are handed out.
    pub parts: Vec<Part>,
}

impl Record {
    /// A record whose tensors are all of one kind.
    pub fn of(kind: Kind, num_elements: impl IntoIterator<Item = usize>) -> Record {
        let part = |num_elements| Part { kind, num_elements };
        Record {
            parts: num_elements.into_iter().map(part).collect(),
        }
    }

    /// Where each part begins, in bytes from the record's start.
    pub(super) fn starts(&self) -> impl Iterator<Item = (usize, Part)> {
        self.parts.iter().scan(0usize, |end, &part| {
            let start = end.next_multiple_of(ALIGNMENT);
            *end = start + part.num_bytes();
            Some((start, part))
        })
    }

    /// Bytes in the file, the gaps between parts included.
    pub fn num_bytes(&self) -> usize {
        let last = self.starts().last();
        last.map_or(0, |(start, part)| start + part.num_bytes())
    }
}

/// Where every record lies.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    records: Vec<Record>,
    offsets: Vec<u64>,
    /// The length of the file.
    pub num_bytes: u64,
}

impl Layout {
    pub(super) fn new(records: Vec<Record>) -> Layout {
        let mut num_bytes = 0;
        let mut place = |record: &Record| {
            let offset = num_bytes;
            num_bytes += (record.num_bytes() as u64).next_multiple_of(PAGE);
            offset
        };
        let offsets = records.iter().map(&mut place).collect();
        Layout {
            records,
            offsets,
            num_bytes,
        }
    }

    pub(super) fn records(&self) -> &[Record] {
        &self.records
    }

    pub(super) fn offset(&self, record: usize) -> u64 {
        self.offsets[record]
    }

    /// What a buffer must hold to serve any record.
    pub(super) fn largest(&self) -> usize {
        self.records
            .iter()
            .map(Record::num_bytes)
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_records_are_aligned_and_do_not_overlap() {
        let mixed = Record {
            parts: vec![
                Part {
                    kind: Kind::BFloat16,
                    num_elements: 3,
                },
                Part {
                    kind: Kind::Double,
                    num_elements: 2,
                },
            ],
        };
        assert_eq!(mixed.num_bytes(), 64 + 16);
        let layout = Layout::new(vec![
            mixed,
            Record::default(),
            Record::of(Kind::Float, [1024, 1]),
            Record::of(Kind::Uint8, [1]),
        ]);
        let offsets: Vec<_> = (0..4).map(|record| layout.offset(record)).collect();
        assert_eq!(offsets, [0, 4096, 4096, 3 * 4096]);
        assert_eq!((layout.num_bytes, layout.largest()), (4 * 4096, 4100));
    }
}
