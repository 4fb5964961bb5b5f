//! Records and their layout in the file.

use tch::Kind;

/// Records are page-aligned, so that no write touches the pages of another record.
const PAGE: u64 = 4096;
/// Alignment of the tensors of a record: suits vector instructions and every element size.
const ALIGNMENT: usize = 64;

/// The type and length of one flat tensor of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorSpec {
    /// Type of the elements.
    pub kind: Kind,
    /// Number of elements.
    pub num_elements: usize,
}

impl TensorSpec {
    /// Length in bytes.
    pub fn num_bytes(&self) -> usize {
        self.num_elements * self.kind.elt_size_in_bytes()
    }
}

/// The unit of I/O: flat tensors that are read and written together.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    /// The tensors, in order.
    pub tensors: Vec<TensorSpec>,
}

impl Record {
    /// A record whose tensors all have the same type.
    pub fn of(kind: Kind, num_elements: impl IntoIterator<Item = usize>) -> Record {
        let spec = |num_elements| TensorSpec { kind, num_elements };
        Record {
            tensors: num_elements.into_iter().map(spec).collect(),
        }
    }

    /// The tensors with their offsets, in bytes from the start of the record.
    pub(super) fn starts(&self) -> impl Iterator<Item = (usize, TensorSpec)> {
        self.tensors.iter().scan(0usize, |end, &spec| {
            let start = end.next_multiple_of(ALIGNMENT);
            *end = start + spec.num_bytes();
            Some((start, spec))
        })
    }

    /// Length in bytes, alignment gaps included.
    pub fn num_bytes(&self) -> usize {
        let last = self.starts().last();
        last.map_or(0, |(start, spec)| start + spec.num_bytes())
    }
}

/// The layout of all records in the file.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    records: Vec<Record>,
    offsets: Vec<u64>,
    /// Length of the file.
    pub num_bytes: u64,
}

impl Layout {
    pub(super) fn new(records: Vec<Record>) -> Layout {
        let mut num_bytes = 0;
        let mut allocate = |record: &Record| {
            let offset = num_bytes;
            num_bytes += (record.num_bytes() as u64).next_multiple_of(PAGE);
            offset
        };
        let offsets = records.iter().map(&mut allocate).collect();
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

    /// Length of the longest record in bytes, which every buffer must fit.
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
    fn tensors_and_records_are_aligned_and_do_not_overlap() {
        let mixed = Record {
            tensors: vec![
                TensorSpec {
                    kind: Kind::BFloat16,
                    num_elements: 3,
                },
                TensorSpec {
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
