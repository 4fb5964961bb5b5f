//! Mistakes of the caller's are errors that name them.

use trainyard_parallel::offload::{OffloadError, Result};

use crate::{floats, holds, write};

#[test]
fn no_file_is_shared_by_two() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let mut first = floats(folder.path(), &[10], 1)?;
    write(&mut first, 0, 5.0)?;
    let second = floats(folder.path(), &[10], 1).map(drop);
    assert!(matches!(second, Err(OffloadError::InUse { path }) if path == first.path()));
    assert!(holds(&first.take(0)?, 5.0), "unharmed");
    drop(first);
    let mut later = floats(folder.path(), &[10], 1)?;
    assert!(holds(&later.take(0)?, 0.0), "nothing of an earlier run");
    Ok(())
}

#[test]
fn a_record_taken_elsewhere_is_not_written() -> Result<()> {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut ours = floats(here.path(), &[10], 1)?;
    let mut theirs = floats(there.path(), &[10], 1)?;
    let staged = theirs.take(0)?;
    let refused = ours.write_behind(staged);
    assert!(matches!(
        refused,
        Err(OffloadError::Foreign { record: 0, .. })
    ));
    assert!(theirs.take(0).is_ok(), "its buffer went home");
    Ok(())
}

#[test]
fn records_and_buffers_must_exist() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let none = floats(folder.path(), &[10], 0).map(drop);
    assert!(matches!(
        none,
        Err(OffloadError::NoBuffer { num_buffers: 0 })
    ));
    let mut spill = floats(folder.path(), &[10, 10], 1)?;
    let (take, ahead) = (spill.take(2).map(drop), spill.read_ahead(2).map(drop));
    for missing in [take, ahead] {
        let is_it = |e: &OffloadError| {
            matches!(
                e,
                OffloadError::NoSuchRecord {
                    record: 2,
                    num_records: 2
                }
            )
        };
        assert!(missing.is_err_and(|e| is_it(&e)));
    }
    Ok(())
}

#[test]
fn a_folder_that_cannot_be_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    match floats(&file, &[10], 1).map(drop) {
        Err(OffloadError::Create { path, .. }) => assert!(path.starts_with(&file)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_taken_may_outlive_the_file() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let mut spill = floats(folder.path(), &[10, 10], 2)?;
    write(&mut spill, 0, 3.0)?;
    spill.read_ahead(1)?;
    let staged = spill.take(0)?;
    drop(spill);
    assert!(holds(&staged, 3.0));
    Ok(())
}
