//! State kept in files: against a model in memory, on a full disk, torn, and overlapped.

mod full_disk;
mod model;
mod overlap;
mod refusals;
mod torn;

use std::path::Path;

use trainyard_parallel::offload::{Record, Result, Spill, Staged};
use trainyard_torch::Kind;

/// Records of one part each, of floats.
fn floats(folder: &Path, lengths: &[usize], num_buffers: usize) -> Result<Spill> {
    let records = lengths
        .iter()
        .map(|&length| Record::of(Kind::Float, [length]));
    Spill::create(folder, 0, records.collect(), num_buffers)
}

/// Sets every element of every part.
fn fill(staged: &Staged, value: f64) {
    for part in staged.iter() {
        let _ = part.shallow_clone().fill_(value);
    }
}

/// Takes a record, sets it to one value and queues it.
fn write(spill: &mut Spill, record: usize, value: f64) -> Result<()> {
    let staged = spill.take(record)?;
    fill(&staged, value);
    spill.write_behind(staged)
}

/// Whether every element of every part has the value.
fn holds(staged: &Staged, value: f64) -> bool {
    staged
        .iter()
        .all(|part| part.eq(value).all().int64_value(&[]) == 1)
}
