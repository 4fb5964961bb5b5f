//! Corrupt records are reported and never returned as data.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use trainyard_parallel::offload::{Corruption, OffloadError, Result, Spill};

use super::{floats, holds, write};

const LENGTH: usize = 3000;

/// A spill with three written records, filled with 1, 2 and 3.
fn written(folder: &tempfile::TempDir) -> Result<(Spill, File)> {
    let mut spill = floats(folder.path(), &[LENGTH; 3], 2)?;
    for record in 0..3 {
        write(&mut spill, record, 1.0 + record as f64)?;
    }
    spill.flush()?;
    let file = OpenOptions::new().read(true).write(true).open(spill.path());
    let file = file.expect("open the offload file");
    Ok((spill, file))
}

/// Takes record 1, which must be corrupt, and returns the cause and its offset.
fn corruption(spill: &mut Spill) -> (Corruption, u64) {
    match spill.take(1).map(drop) {
        Err(OffloadError::Corrupt {
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
        other => panic!("expected a corrupt record: {other:?}"),
    }
}

#[test]
fn a_flipped_bit_corrupts_only_its_record() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let (mut spill, file) = written(&folder)?;
    let offset = 12288; // record 0 takes three pages
    for position in [0, 4 * LENGTH as u64 / 2, 4 * LENGTH as u64 - 1] {
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset + position).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], offset + position)
            .unwrap();
        let (cause, at) = corruption(&mut spill);
        assert!(
            matches!(cause, Corruption::ChecksumMismatch { written, found } if written != found)
        );
        assert_eq!(at, offset);
        assert!(holds(&spill.take(0)?, 1.0) && holds(&spill.take(2)?, 3.0));
        file.write_all_at(&byte, offset + position).unwrap();
        assert!(
            holds(&spill.take(1)?, 2.0),
            "the restored record is not readable"
        );
    }
    Ok(())
}

#[test]
fn a_truncated_file_corrupts_the_missing_records() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let (mut spill, file) = written(&folder)?;
    file.set_len(12288 + 5).unwrap();
    let (cause, offset) = corruption(&mut spill);
    assert_eq!((cause, offset), (Corruption::Truncated, 12288));
    assert!(holds(&spill.take(0)?, 1.0));
    assert!(spill.take(2).is_err());
    write(&mut spill, 0, 7.0)?;
    assert!(
        holds(&spill.take(0)?, 7.0),
        "other records are still usable"
    );
    Ok(())
}

#[test]
fn a_lost_write_is_detected() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let (mut spill, file) = written(&folder)?;
    let mut old = vec![0; 4 * LENGTH];
    file.read_exact_at(&mut old, 12288).unwrap();
    write(&mut spill, 1, 8.0)?;
    spill.flush()?;
    // The previous contents are valid, but not those of the last write.
    file.write_all_at(&old, 12288).unwrap();
    assert!(matches!(
        corruption(&mut spill).0,
        Corruption::ChecksumMismatch { .. }
    ));
    Ok(())
}

#[test]
fn a_corrupt_read_ahead_is_reported_when_the_record_is_taken() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let (mut spill, file) = written(&folder)?;
    file.write_all_at(&[0xff], 12288).unwrap();
    assert!(spill.read_ahead(1)?);
    assert!(holds(&spill.take(0)?, 1.0), "the error belongs to record 1");
    let (cause, _) = corruption(&mut spill);
    let error = OffloadError::Corrupt {
        path: spill.path().to_owned(),
        record: 1,
        offset: 12288,
        num_bytes: 12000,
        cause,
    };
    let message = error.to_string();
    for word in ["rank-0.spill", "record 1", "12288", "checkpoint"] {
        assert!(message.contains(word), "{word} in: {message}");
    }
    Ok(())
}
