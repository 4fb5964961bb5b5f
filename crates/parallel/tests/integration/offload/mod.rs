//! Offload to files: compared with a model in memory, on a full disk, with corrupt files, and its overlap.

mod corruption;
mod full_disk;
mod misuse;
mod model;
mod overlap;

use std::path::Path;

use trainyard_parallel::offload::{Record, Result, Spill, Staged};
use trainyard_torch::Kind;

/// A spill with records of one float tensor each.
fn floats(folder: &Path, lengths: &[usize], num_buffers: usize) -> Result<Spill> {
    let records = lengths
        .iter()
        .map(|&length| Record::of(Kind::Float, [length]));
    Spill::create(folder, 0, records.collect(), num_buffers)
}

/// Sets every element of every tensor.
fn fill(staged: &Staged, value: f64) {
    for tensor in staged.iter() {
        let _ = tensor.shallow_clone().fill_(value);
    }
}

/// Takes a record, fills it with a value and queues its write.
fn write(spill: &mut Spill, record: usize, value: f64) -> Result<()> {
    let staged = spill.take(record)?;
    fill(&staged, value);
    spill.write_behind(staged)
}

/// Whether every element of every tensor has the value.
fn holds(staged: &Staged, value: f64) -> bool {
    staged
        .iter()
        .all(|tensor| tensor.eq(value).all().int64_value(&[]) == 1)
}
