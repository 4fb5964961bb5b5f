//! Staging buffers are allocated once. The test counts all memory of their kind in the process.

use trainyard_parallel::offload::{Record, Spill};
use trainyard_torch::{Kind, memory};
use trainyard_trace::MemoryKind;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

const NUM_RECORDS: usize = 10;
const NUM_BUFFERS: usize = 3;

fn staged_bytes() -> Result<u64> {
    let kind = memory::KINDS
        .iter()
        .position(|&kind| kind == MemoryKind::Communication);
    Ok(memory::report()?.allocated[kind.ok_or("no such kind")?])
}

#[test]
fn offload_never_allocates_more_than_its_buffers() -> Result {
    memory::observe();
    let folder = tempfile::tempdir()?;
    // The largest record has 1000 + 8 (alignment) + 1000 elements.
    let records = (1..=NUM_RECORDS).map(|n| Record::of(Kind::Float, [100 * n, 100 * n]));
    let bound = (NUM_BUFFERS * 4 * 2008) as u64;
    let before = staged_bytes()?;
    let mut spill = Spill::create(folder.path(), 0, records.collect(), NUM_BUFFERS)?;
    assert_eq!(staged_bytes()?, before + bound);
    let (outcome, allocations) = memory::record(|| -> Result {
        for _ in 0..5 {
            let mut num_queued = 0;
            for record in 0..NUM_RECORDS {
                num_queued += usize::from(spill.read_ahead(record)?);
            }
            assert!(num_queued <= NUM_BUFFERS, "{num_queued} at once");
            for record in 0..NUM_RECORDS {
                let staged = spill.take(record)?;
                spill.write_behind(staged)?;
                assert_eq!(staged_bytes()?, before + bound);
            }
            spill.flush()?;
        }
        Ok(())
    });
    outcome?;
    let staging = allocations
        .iter()
        .filter(|a| a.kind == MemoryKind::Communication);
    assert_eq!(staging.count(), 0, "staging memory was allocated or freed");
    drop(spill);
    assert_eq!(staged_bytes()?, before);
    Ok(())
}
