//! Model-based test: any sequence of calls behaves like an array in memory.

use std::collections::BTreeMap;

use proptest::prelude::*;
use trainyard_parallel::offload::{OffloadError, Record, Result, Spill, Staged, TensorSpec};
use trainyard_torch::Kind;

use super::{fill, holds};

const NUM_RECORDS: usize = 6;

#[derive(Debug, Clone, Copy)]
enum Call {
    ReadAhead(usize),
    Take(usize),
    Write(usize, u8),
    Drop(usize),
    Flush,
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let record = 0..NUM_RECORDS;
    let call = prop_oneof![
        3 => record.clone().prop_map(Call::ReadAhead),
        4 => record.clone().prop_map(Call::Take),
        4 => (record.clone(), 1u8..100).prop_map(|(record, value)| Call::Write(record, value)),
        1 => record.prop_map(Call::Drop),
        1 => Just(Call::Flush),
    ];
    proptest::collection::vec(call, 1..80)
}

/// Several types, an empty tensor, an empty record, and lengths that are not multiples of a page.
fn records() -> Vec<Record> {
    let spec = |kind, num_elements| TensorSpec { kind, num_elements };
    vec![
        Record::of(Kind::Float, [1000, 1000]),
        Record::of(Kind::Double, [3]),
        Record::default(),
        Record {
            tensors: vec![
                spec(Kind::BFloat16, 5),
                spec(Kind::Float, 0),
                spec(Kind::Int64, 7),
            ],
        },
        Record::of(Kind::Float, [50_000]),
        Record::of(Kind::Uint8, [4097]),
    ]
}

/// The expected value of each record, and the records that the caller holds.
struct Model {
    spill: Spill,
    num_buffers: usize,
    values: [u8; NUM_RECORDS],
    taken: BTreeMap<usize, Staged>,
}

impl Model {
    fn call(&mut self, call: Call) -> Result<()> {
        match call {
            Call::ReadAhead(record) => self.read_ahead(record),
            Call::Take(record) => self.take(record)?,
            Call::Write(record, value) => {
                if let Some(staged) = self.taken.remove(&record) {
                    fill(&staged, f64::from(value));
                    self.values[record] = value;
                    self.spill.write_behind(staged)?;
                }
            }
            Call::Drop(record) => {
                if let Some(staged) = self.taken.remove(&record) {
                    // A change that was not written must be discarded.
                    fill(&staged, 111.0);
                }
            }
            Call::Flush => self.spill.flush()?,
        }
        Ok(())
    }

    fn read_ahead(&mut self, record: usize) {
        let queued = self.spill.read_ahead(record);
        if self.taken.contains_key(&record) {
            assert!(matches!(queued, Err(OffloadError::AlreadyTaken { record: r }) if r == record));
        } else if self.taken.len() == self.num_buffers {
            assert!(matches!(queued, Ok(false)));
        } else {
            assert!(queued.is_ok());
        }
    }

    fn take(&mut self, record: usize) -> Result<()> {
        let staged = self.spill.take(record);
        if self.taken.contains_key(&record) {
            assert!(matches!(staged, Err(OffloadError::AlreadyTaken { .. })));
        } else if self.taken.len() == self.num_buffers {
            assert!(matches!(staged, Err(OffloadError::NoBuffer { .. })));
        } else {
            let staged = staged?;
            assert!(holds(&staged, f64::from(self.values[record])), "{record}");
            self.taken.insert(record, staged);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_sequence_of_calls_agrees_with_memory(num_buffers in 1usize..5, calls in calls()) {
        let folder = tempfile::tempdir()?;
        let mut model = Model {
            spill: Spill::create(folder.path(), 3, records(), num_buffers)?,
            num_buffers,
            values: [0; NUM_RECORDS],
            taken: BTreeMap::new(),
        };
        for call in calls {
            model.call(call)?;
        }
        model.taken.clear();
        for record in 0..NUM_RECORDS {
            model.take(record)?;
            model.taken.clear();
        }
        drop(model);
        prop_assert_eq!(std::fs::read_dir(folder.path())?.count(), 0, "the file was not removed");
    }
}
