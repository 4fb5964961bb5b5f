//! A full disk is an error that says so, at creation if the file system can reserve room.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;
use trainyard_parallel::offload::{OffloadError, Result, Tear};

use crate::{floats, holds, write};

const DISK: u64 = 1 << 20;

/// A disk of one mebibyte, in memory, for the length of a test.
struct SmallDisk {
    folder: TempDir,
}

impl SmallDisk {
    fn mount() -> Result<SmallDisk, String> {
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={DISK}"), "none"]);
        let said = mount
            .arg(folder.path())
            .output()
            .map_err(|e| e.to_string())?;
        if !said.status.success() {
            let reason = String::from_utf8_lossy(&said.stderr).trim().to_owned();
            return Err(format!("no tmpfs can be mounted here: {reason}"));
        }
        Ok(SmallDisk { folder })
    }

    /// The disk, or a word on why the test is left out.
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
fn records_that_do_not_fit_are_refused_at_creation() -> Result<()> {
    let Some(disk) = SmallDisk::for_test("records_that_do_not_fit_are_refused_at_creation") else {
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
        other => panic!("not full: {other:?}"),
    }
    assert_eq!(fs::read_dir(disk.path()).unwrap().count(), 0, "left behind");
    // What does fit is not refused afterwards.
    let mut spill = floats(disk.path(), &[100_000, 100_000], 1)?;
    write(&mut spill, 1, 4.0)?;
    assert!(holds(&spill.take(1)?, 4.0));
    Ok(())
}

#[test]
fn a_write_without_room_is_told_by_the_next_call() -> Result<()> {
    let Some(disk) = SmallDisk::for_test("a_write_without_room_is_told_by_the_next_call") else {
        return Ok(());
    };
    const LENGTH: usize = 50_000;
    let mut spill = floats(disk.path(), &[LENGTH; 2], 2)?;
    write(&mut spill, 0, 1.0)?;
    spill.flush()?;
    give_room_away(spill.path(), disk.path());
    let queued = write(&mut spill, 1, 2.0);
    // The write may have failed before the call that queued it looked.
    let told = queued.and_then(|()| spill.flush());
    match told {
        Err(OffloadError::DiskFull { path, needed, .. }) => {
            assert_eq!((path.as_path(), needed), (spill.path(), 4 * LENGTH as u64))
        }
        other => panic!("not full: {other:?}"),
    }
    let after = spill.take(1).map(drop);
    assert!(
        matches!(
            after,
            Err(OffloadError::Torn {
                cause: Tear::WriteFailed,
                ..
            })
        ),
        "{after:?}"
    );
    assert!(spill.flush().is_ok(), "told once");
    Ok(())
}

/// Takes back what was reserved for the file and fills the disk, as on a file system that reserves
/// nothing.
fn give_room_away(file: &Path, folder: &Path) {
    let reserved = File::options().write(true).open(file).unwrap();
    let length = reserved.metadata().unwrap().len();
    reserved.set_len(0).unwrap();
    reserved.set_len(length).unwrap();
    let full = fs::write(folder.join("ballast"), vec![1; 2 * DISK as usize]);
    assert_eq!(full.unwrap_err().kind(), io::ErrorKind::StorageFull);
}
