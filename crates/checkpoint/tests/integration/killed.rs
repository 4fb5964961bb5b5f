//! Fault injection: a save that is killed, or gets an I/O error, at every system call that changes a file.
//!
//! The save runs in a child process (this test program) under `strace`, which kills it at the n-th call, or
//! makes that call fail with ENOSPC. n increases until the save succeeds.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use trainyard_checkpoint::{
    Checkpoint, Dtype, ElementSource, Store, TrainState, WriteItem, commit, latest, retain,
    step_dir, store, write_shard,
};
use trainyard_mesh::Slice;

/// Environment variables for the child process: the directory and the step to save.
const SAVE_DIR: &str = "TRAINYARD_TEST_SAVE_INTO";
const SAVE_STEP: &str = "TRAINYARD_TEST_SAVE_STEP";
/// System calls that change the file system. `strace` counts each of them separately.
const CALLS: [&str; 8] = [
    "openat", "write", "fsync", "rename", "unlink", "unlinkat", "mkdir", "rmdir",
];
/// An upper bound for the number of calls of a save.
const MAX_CALLS: usize = 1000;
const NUM_ELEMENTS: usize = 3 << 20;

/// Elements that depend on the step.
struct Pattern(u64);

impl ElementSource for Pattern {
    fn copy(&self, index: usize, start: usize, into: &mut [u8]) -> io::Result<()> {
        let byte = |at: usize| (at as u64 * 7 + self.0 * 13 + index as u64) as u8;
        into.iter_mut()
            .enumerate()
            .for_each(|(i, b)| *b = byte(start + i));
        Ok(())
    }
}

fn save(store: &dyn Store, step: u64) -> trainyard_checkpoint::Result<()> {
    let item = |name: &str| WriteItem {
        name: name.to_owned(),
        dtype: Dtype::U8,
        shape: vec![NUM_ELEMENTS],
        slice: Slice::full(&[NUM_ELEMENTS]),
    };
    let mut shards = Vec::new();
    for (rank, name) in ["model/a", "model/b"].into_iter().enumerate() {
        let file = format!("rank{rank:05}-{step}.safetensors");
        let elements = Pattern(step);
        shards.push(write_shard(
            store,
            &step_dir(step),
            &file,
            &[item(name)],
            &elements,
        )?);
    }
    let state = TrainState {
        step,
        samples_seen: 0,
        seed: 0,
        world_size: 2,
        config: String::new(),
        extra_state: serde_json::Value::Null,
    };
    commit(store, state, shards)?;
    retain(store, step, 1, None)
}

/// Not a test by itself: the child process of the tests below.
#[test]
fn child_process_saves() {
    let (Some(dir), Ok(step)) = (std::env::var_os(SAVE_DIR), std::env::var(SAVE_STEP)) else {
        return;
    };
    let saved = save(
        &*store::open(Path::new(&dir)).unwrap(),
        step.parse().unwrap(),
    );
    std::process::exit(if saved.is_ok() { 0 } else { 3 });
}

/// Saves step 2 in a child process whose `at`-th system call `call` gets `fault`. Returns the exit code.
fn save_with(dir: &Path, call: &str, fault: &str, at: usize) -> Option<i32> {
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
        .args([
            "--exact",
            "killed::child_process_saves",
            "--test-threads",
            "1",
        ])
        .env(SAVE_DIR, dir)
        .env(SAVE_STEP, "2")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    status.code()
}

/// Verifies the newest checkpoint completely and returns its step.
fn newest(dir: &Path) -> u64 {
    let store = store::open(dir).unwrap();
    let name = latest(&*store).unwrap().expect("no complete checkpoint");
    let checkpoint = Checkpoint::open(store, &name).unwrap();
    checkpoint.verify(|_| ()).unwrap();
    checkpoint.state().unwrap().step
}

/// Whether `strace` works here; prints why the test is skipped if not.
fn has_strace() -> bool {
    let mut tracing = Command::new("strace");
    tracing.args(["-f", "-qq", "-o", "/dev/null", "true"]);
    let traced = tracing.stdout(Stdio::null()).stderr(Stdio::null()).status();
    let can_trace = traced.is_ok_and(|status| status.success());
    if !can_trace {
        println!("skipped: strace is not installed, or has no permission to trace");
    }
    can_trace
}

/// Injects a fault at every occurrence of every call until the save succeeds. Returns how often the old
/// checkpoint was the newest afterwards, and how often the new one.
fn at_every_call(calls: &[&str], fault: &str) -> (usize, usize) {
    let (mut num_old, mut num_new) = (0, 0);
    for call in calls {
        for at in 1..=MAX_CALLS {
            let dir = tempfile::tempdir().unwrap();
            save(&*store::open(dir.path()).unwrap(), 1).unwrap();
            let ended = save_with(dir.path(), call, fault, at);
            let found = newest(dir.path());
            if ended == Some(0) {
                assert_eq!(found, 2);
                break;
            }
            assert!(at < MAX_CALLS, "the save never succeeds under {call}");
            match found {
                1 => num_old += 1,
                _ => num_new += 1,
            }
            // The next save succeeds.
            save(&*store::open(dir.path()).unwrap(), 3).unwrap();
            assert_eq!(newest(dir.path()), 3);
        }
    }
    (num_old, num_new)
}

#[test]
fn after_a_kill_at_any_call_the_newest_complete_checkpoint_loads() {
    if has_strace() {
        let (old, new) = at_every_call(&CALLS, "signal=KILL");
        println!(
            "killed {} times: {old} left the old checkpoint, {new} the new one",
            old + new
        );
        assert!(old > 10 && new > 1);
    }
}

/// Covers only calls that can return ENOSPC; opening a shared library cannot.
#[test]
fn a_full_disk_at_any_call_is_an_error_and_the_next_save_succeeds() {
    if has_strace() {
        let (old, new) = at_every_call(&["write", "fsync", "rename", "mkdir"], "error=ENOSPC");
        println!(
            "failed {} times: {old} left the old checkpoint, {new} the new one",
            old + new
        );
        assert!(old > 5);
    }
}
