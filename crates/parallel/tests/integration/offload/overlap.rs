//! Overlap of I/O with computation. It is printed, not asserted, because it depends on the hardware.

use trainyard_parallel::offload::{Record, Result, Spill};
use trainyard_torch::{Device, Kind, Tensor};

use super::fill;

const NUM_RECORDS: usize = 6;
const NUM_STEPS: usize = 3;
const LENGTH: usize = 1 << 20;

/// Updates all records in order, as an optimizer does, with computation in between.
fn pass(spill: &mut Spill, num_ahead: usize, work: &Tensor) -> Result<()> {
    for record in 0..NUM_RECORDS {
        for next in record..(record + num_ahead).min(NUM_RECORDS) {
            spill.read_ahead(next)?;
        }
        let staged = spill.take(record)?;
        assert_eq!(work.matmul(work).size(), work.size());
        fill(&staged, record as f64);
        spill.write_behind(staged)?;
    }
    spill.flush()
}

#[test]
fn overlap_is_measured() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let work = Tensor::ones([512, 512], (Kind::Float, Device::Cpu));
    for (num_buffers, num_ahead) in [(1, 1), (3, 2)] {
        let records = vec![Record::of(Kind::Float, [LENGTH, LENGTH]); NUM_RECORDS];
        let mut spill = Spill::create(folder.path(), 0, records, num_buffers)?;
        for _ in 0..NUM_STEPS {
            pass(&mut spill, num_ahead, &work)?;
        }
        let counters = spill.counters();
        let bytes_per_step = (NUM_RECORDS * 2 * LENGTH * 4) as u64;
        assert_eq!(counters.bytes_written, NUM_STEPS as u64 * bytes_per_step);
        // The first step reads nothing, since no record has been written.
        assert_eq!(counters.bytes_read, (NUM_STEPS as u64 - 1) * bytes_per_step);
        assert!((0.0..=1.0).contains(&spill.overlap()));
        let gigabytes = (counters.bytes_read + counters.bytes_written) as f64 / 1e9;
        println!(
            "{num_buffers} buffers: {gigabytes:.2} GB moved in {:?}, waited {:?}, overlap {:.2}",
            counters.busy,
            counters.waited,
            spill.overlap()
        );
    }
    Ok(())
}
