//! A save that is killed, or refused, at every system call that changes a file.
//!
//! The save runs in a process of its own, this test program again, under `strace`, which ends it at the
//! n-th call, or makes that call fail as a full disk would; n goes up until the save gets through.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use trainyard_checkpoint::{
    Checkpoint, Dtype, Elements, Part, Store, TrainState, commit, latest, retain, step_folder,
    store, write_shard,
};
use trainyard_mesh::Slice;

/// Tells the program that it is the one to save, where, and which step.
const FOLDER: &str = "TRAINYARD_TEST_SAVE_INTO";
const STEP: &str = "TRAINYARD_TEST_SAVE_STEP";
/// Calls that change what is on the disk. `strace` counts each by itself.
const CALLS: [&str; 8] = [
    "openat", "write", "fsync", "rename", "unlink", "unlinkat", "mkdir", "rmdir",
];
/// Nothing here calls anything more often.
const MOST_CALLS: usize = 1000;
const ELEMENTS: usize = 3 << 20;

struct Numbers(u64);

impl Elements for Numbers {
    fn copy(&self, index: usize, start: usize, into: &mut [u8]) -> io::Result<()> {
        let byte = |at: usize| (at as u64 * 7 + self.0 * 13 + index as u64) as u8;
        into.iter_mut()
            .enumerate()
            .for_each(|(i, b)| *b = byte(start + i));
        Ok(())
    }
}

fn save(store: &dyn Store, step: u64) -> trainyard_checkpoint::Result<()> {
    let part = |name: &str| Part {
        name: name.to_owned(),
        dtype: Dtype::U8,
        shape: vec![ELEMENTS],
        slice: Slice::whole(&[ELEMENTS]),
    };
    let mut shards = Vec::new();
    for (rank, name) in ["model/a", "model/b"].into_iter().enumerate() {
        let file = format!("rank{rank:05}-{step}.safetensors");
        let elements = Numbers(step);
        shards.push(write_shard(
            store,
            &step_folder(step),
            &file,
            &[part(name)],
            &elements,
        )?);
    }
    let state = TrainState {
        step,
        samples_seen: 0,
        seed: 0,
        world_size: 2,
        config: String::new(),
        schedule: serde_json::Value::Null,
    };
    commit(store, state, shards)?;
    retain(store, step, 1)
}

/// Not a test by itself: the save that the tests below start.
#[test]
fn saves_when_it_is_told_to() {
    let (Some(folder), Ok(step)) = (std::env::var_os(FOLDER), std::env::var(STEP)) else {
        return;
    };
    let saved = save(
        &*store::open(Path::new(&folder)).unwrap(),
        step.parse().unwrap(),
    );
    std::process::exit(if saved.is_ok() { 0 } else { 3 });
}

/// Saves step 2 in another process, of which the `at`th such call does what `fault` says.
fn save_with(folder: &Path, call: &str, fault: &str, at: usize) -> Option<i32> {
    let program = std::env::current_exe().unwrap();
    let status = Command::new("strace")
        .args([
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            "-e",
            &format!("trace={call}"),
        ])
        .args(["-e", &format!("inject={call}:{fault}:when={at}")])
        .arg(program)
        .args(["--exact", "saves_when_it_is_told_to", "--test-threads", "1"])
        .env(FOLDER, folder)
        .env(STEP, "2")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    status.code()
}

/// The newest checkpoint, read to the last byte; returns its step.
fn newest(folder: &Path) -> u64 {
    let store = store::open(folder).unwrap();
    let name = latest(&*store).unwrap().expect("there is none");
    let checkpoint = Checkpoint::open(store, &name).unwrap();
    checkpoint.verify(|_| ()).unwrap();
    checkpoint.state().unwrap().step
}

/// Whether calls can be traced here; says so where not.
fn has_strace() -> bool {
    let mut tracing = Command::new("strace");
    tracing.args(["-f", "-qq", "-o", "/dev/null", "true"]);
    let traced = tracing.stdout(Stdio::null()).stderr(Stdio::null()).status();
    let can_trace = traced.is_ok_and(|status| status.success());
    if !can_trace {
        println!("skipped: strace is not installed, or may not trace here");
    }
    can_trace
}

/// Tries a fault at every call of every kind, until the save gets through. Returns how often the old
/// checkpoint was left and how often the new one.
fn at_every_call(calls: &[&str], fault: &str) -> (usize, usize) {
    let (mut num_old, mut num_new) = (0, 0);
    for call in calls {
        for at in 1..=MOST_CALLS {
            let folder = tempfile::tempdir().unwrap();
            save(&*store::open(folder.path()).unwrap(), 1).unwrap();
            let ended = save_with(folder.path(), call, fault, at);
            let found = newest(folder.path());
            if ended == Some(0) {
                assert_eq!(found, 2);
                break;
            }
            assert!(at < MOST_CALLS, "{call} never gets through");
            match found {
                1 => num_old += 1,
                _ => num_new += 1,
            }
            // And the next save works.
            save(&*store::open(folder.path()).unwrap(), 3).unwrap();
            assert_eq!(newest(folder.path()), 3);
        }
    }
    (num_old, num_new)
}

#[test]
fn killed_anywhere_the_newest_complete_one_loads() {
    if has_strace() {
        let (old, new) = at_every_call(&CALLS, "signal=KILL");
        println!(
            "killed {} times: {old} left the old one, {new} the new one",
            old + new
        );
        assert!(old > 10 && new > 1);
    }
}

/// Only where a full disk can be met: opening a library is not such a place.
#[test]
fn a_full_disk_anywhere_is_an_error_and_the_next_save_works() {
    if has_strace() {
        let (old, new) = at_every_call(&["write", "fsync", "rename", "mkdir"], "error=ENOSPC");
        println!(
            "refused {} times: {old} left the old one, {new} the new one",
            old + new
        );
        assert!(old > 5);
    }
}
