//! Misuse by the caller is reported as a specific error.

use trainyard_parallel::offload::{OffloadError, Result};

use super::{floats, holds, write};

#[test]
fn a_file_cannot_be_opened_twice() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let mut first = floats(folder.path(), &[10], 1)?;
    write(&mut first, 0, 5.0)?;
    let second = floats(folder.path(), &[10], 1).map(drop);
    assert!(matches!(second, Err(OffloadError::InUse { path }) if path == first.path()));
    assert!(holds(&first.take(0)?, 5.0), "the first file was changed");
    drop(first);
    let mut later = floats(folder.path(), &[10], 1)?;
    assert!(
        holds(&later.take(0)?, 0.0),
        "data of an earlier run is visible"
    );
    Ok(())
}

#[test]
fn a_record_of_another_file_is_rejected() -> Result<()> {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut ours = floats(here.path(), &[10], 1)?;
    let mut theirs = floats(there.path(), &[10], 1)?;
    let staged = theirs.take(0)?;
    let failed = ours.write_behind(staged);
    assert!(matches!(
        failed,
        Err(OffloadError::WrongFile { record: 0, .. })
    ));
    assert!(theirs.take(0).is_ok(), "the buffer was not released");
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
fn an_invalid_directory_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    match floats(&file, &[10], 1).map(drop) {
        Err(OffloadError::Create { path, .. }) => assert!(path.starts_with(&file)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_taken_record_may_outlive_the_file() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let mut spill = floats(folder.path(), &[10, 10], 2)?;
    write(&mut spill, 0, 3.0)?;
    spill.read_ahead(1)?;
    let staged = spill.take(0)?;
    drop(spill);
    assert!(holds(&staged, 3.0));
    Ok(())
}
