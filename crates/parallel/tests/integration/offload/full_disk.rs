//! A full disk is reported, at creation if the file system supports preallocation.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;
use trainyard_parallel::offload::{Corruption, OffloadError, Result};

use super::{floats, holds, write};

const DISK: u64 = 1 << 20;

/// A tmpfs of one mebibyte that is mounted for the duration of a test.
struct SmallDisk {
    folder: TempDir,
}

impl SmallDisk {
    fn mount() -> Result<SmallDisk, String> {
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={DISK}"), "none"]);
        let output = mount
            .arg(folder.path())
            .output()
            .map_err(|e| e.to_string())?;
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(format!("cannot mount a tmpfs: {reason}"));
        }
        Ok(SmallDisk { folder })
    }

    /// Mounts the disk, or prints why the test is skipped.
    fn for_test(name: &str) -> Option<SmallDisk> {
        let disk = SmallDisk::mount();
        disk.inspect_err(|reason| eprintln!("SKIPPED {name}: {reason}"))
            .ok()
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let ended = Command::new("umount").arg(self.path()).status();
        if !ended.is_ok_and(|status| status.success()) {
            eprintln!("{} stays mounted", self.path().display());
        }
    }
}

#[test]
fn a_full_disk_is_reported_at_creation() -> Result<()> {
    let Some(disk) = SmallDisk::for_test("a_full_disk_is_reported_at_creation") else {
        return Ok(());
    };
    match floats(disk.path(), &[200_000, 200_000], 1).map(drop) {
        Err(OffloadError::DiskFull {
            path,
            needed,
            available,
        }) => {
            assert_eq!(path, disk.path().join("rank-0.spill"));
            assert!(needed >= 1_600_000 && available.is_some_and(|bytes| bytes <= DISK));
        }
        other => panic!("expected a full disk: {other:?}"),
    }
    assert_eq!(
        fs::read_dir(disk.path()).unwrap().count(),
        0,
        "a file was left behind"
    );
    // Records that fit can be created afterwards.
    let mut spill = floats(disk.path(), &[100_000, 100_000], 1)?;
    write(&mut spill, 1, 4.0)?;
    assert!(holds(&spill.take(1)?, 4.0));
    Ok(())
}

#[test]
fn a_write_to_a_full_disk_is_reported_by_the_next_call() -> Result<()> {
    let Some(disk) = SmallDisk::for_test("a_write_to_a_full_disk_is_reported_by_the_next_call")
    else {
        return Ok(());
    };
    const LENGTH: usize = 50_000;
    let mut spill = floats(disk.path(), &[LENGTH; 2], 2)?;
    write(&mut spill, 0, 1.0)?;
    spill.flush()?;
    fill_disk(spill.path(), disk.path());
    let queued = write(&mut spill, 1, 2.0);
    // The write may fail before the call that queued it returns.
    let reported = queued.and_then(|()| spill.flush());
    match reported {
        Err(OffloadError::DiskFull { path, needed, .. }) => {
            assert_eq!((path.as_path(), needed), (spill.path(), 4 * LENGTH as u64))
        }
        other => panic!("expected a full disk: {other:?}"),
    }
    let after = spill.take(1).map(drop);
    assert!(
        matches!(
            after,
            Err(OffloadError::Corrupt {
                cause: Corruption::WriteFailed,
                ..
            })
        ),
        "{after:?}"
    );
    assert!(spill.flush().is_ok(), "the failure is reported once");
    Ok(())
}

/// Frees the preallocated space of the file and fills the disk, as on a file system without preallocation.
fn fill_disk(file: &Path, folder: &Path) {
    let reserved = File::options().write(true).open(file).unwrap();
    let length = reserved.metadata().unwrap().len();
    reserved.set_len(0).unwrap();
    reserved.set_len(length).unwrap();
    let full = fs::write(folder.join("ballast"), vec![1; 2 * DISK as usize]);
    assert_eq!(full.unwrap_err().kind(), io::ErrorKind::StorageFull);
}
