//! What the file no longer holds as it was written is an error, and never data.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use trainyard_parallel::offload::{OffloadError, Result, Spill, Tear};

use crate::{floats, holds, write};

const LENGTH: usize = 3000;

/// Three records with 1, 2 and 3 in them, on disk.
fn written(folder: &tempfile::TempDir) -> Result<(Spill, File)> {
    let mut spill = floats(folder.path(), &[LENGTH; 3], 2)?;
    for record in 0..3 {
        write(&mut spill, record, 1.0 + record as f64)?;
    }
    spill.flush()?;
    let file = OpenOptions::new().read(true).write(true).open(spill.path());
    let file = file.expect("the file is where the spill says");
    Ok((spill, file))
}

/// Takes record 1, which must be torn, and says how and where.
fn tear(spill: &mut Spill) -> (Tear, u64) {
    match spill.take(1).map(drop) {
        Err(OffloadError::Torn {
            path,
            record: 1,
            offset,
            num_bytes,
            cause,
        }) => {
            assert_eq!(path, spill.path());
            assert_eq!(num_bytes, 4 * LENGTH as u64);
            (cause, offset)
        }
        other => panic!("not torn: {other:?}"),
    }
}

#[test]
fn a_flipped_bit_tears_its_record_and_no_other() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let (mut spill, file) = written(&folder)?;
    let offset = 12288; // three pages for the record before
    for place in [0, 4 * LENGTH as u64 / 2, 4 * LENGTH as u64 - 1] {
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset + place).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], offset + place)
            .unwrap();
        let (cause, at) = tear(&mut spill);
        assert!(matches!(cause, Tear::Checksum { written, found } if written != found));
        assert_eq!(at, offset);
        assert!(holds(&spill.take(0)?, 1.0) && holds(&spill.take(2)?, 3.0));
        file.write_all_at(&byte, offset + place).unwrap();
        assert!(holds(&spill.take(1)?, 2.0), "mended, and so read again");
    }
    Ok(())
}

#[test]
fn a_file_cut_short_tears_what_was_cut() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let (mut spill, file) = written(&folder)?;
    file.set_len(12288 + 5).unwrap();
    let (cause, offset) = tear(&mut spill);
    assert_eq!((cause, offset), (Tear::Short, 12288));
    assert!(holds(&spill.take(0)?, 1.0));
    assert!(spill.take(2).is_err());
    write(&mut spill, 0, 7.0)?;
    assert!(holds(&spill.take(0)?, 7.0), "the others go on");
    Ok(())
}

#[test]
fn a_write_that_never_arrived_is_noticed() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let (mut spill, file) = written(&folder)?;
    let mut old = vec![0; 4 * LENGTH];
    file.read_exact_at(&mut old, 12288).unwrap();
    write(&mut spill, 1, 8.0)?;
    spill.flush()?;
    // What was there before, whole and valid, but not what was written last.
    file.write_all_at(&old, 12288).unwrap();
    assert!(matches!(tear(&mut spill).0, Tear::Checksum { .. }));
    Ok(())
}

#[test]
fn a_torn_read_ahead_is_told_when_it_is_taken() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let (mut spill, file) = written(&folder)?;
    file.write_all_at(&[0xff], 12288).unwrap();
    assert!(spill.read_ahead(1)?);
    assert!(holds(&spill.take(0)?, 1.0), "not this one's error");
    let (cause, _) = tear(&mut spill);
    let error = OffloadError::Torn {
        path: spill.path().to_owned(),
        record: 1,
        offset: 12288,
        num_bytes: 12000,
        cause,
    };
    let said = error.to_string();
    for word in ["rank-0.spill", "record 1", "12288", "checkpoint"] {
        assert!(said.contains(word), "{word} in: {said}");
    }
    Ok(())
}
