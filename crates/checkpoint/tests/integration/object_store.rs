//! An object store gives the same guarantees as a directory, and classifies the errors of its server.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bucket::{BUCKET, Server, free_port, open, python, variables};
use trainyard_checkpoint::store::{self, LocalStore, ObjectStore, RemoteErrorKind};
use trainyard_checkpoint::{
    Checkpoint, CheckpointError, Dtype, ElementSource, Owner, Ownership, ReadRequest, Store,
    TrainState, WriteItem, commit, latest, retain, step_dir, write_shard,
};
use trainyard_mesh::{Region, Slice};

/// The time within which a request to a dead server must fail, on a busy host.
const TIME_LIMIT: Duration = Duration::from_secs(75);
/// The rows of the tensor, which the ranks divide.
const ROWS: usize = 10;
/// With two ranks a shard has 40 MiB: more than one part of a multipart upload.
const COLUMNS: usize = 8 << 20;

/// Runs a test with a server, or skips it if there is none.
fn with_server(test: impl FnOnce(&mut Server, u16)) {
    match python() {
        Err(reason) => eprintln!("skipped: {reason}"),
        Ok(python) => {
            let port = free_port();
            test(&mut Server::start(&python, port), port);
        }
    }
}

fn byte(step: u64, at: usize) -> u8 {
    (at as u64)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15 + 2 * step)
        .to_le_bytes()[5]
}

/// Rows from `first` on of a tensor whose elements depend on the step.
struct Rows {
    step: u64,
    first: usize,
}

impl ElementSource for Rows {
    fn copy(&self, _: usize, start: usize, into: &mut [u8]) -> io::Result<()> {
        let start = self.first * COLUMNS + start;
        let bytes = into.iter_mut().enumerate();
        bytes.for_each(|(i, b)| *b = byte(self.step, start + i));
        Ok(())
    }
}

fn rows(first: usize, num_rows: usize) -> Slice {
    Slice {
        region: Region {
            offsets: vec![first, 0],
            lengths: vec![num_rows, COLUMNS],
        },
        flat: None,
    }
}

/// Saves as a job would whose ranks have `num_rows` rows each.
fn save(store: &dyn Store, step: u64, num_rows: usize) -> Result<String, CheckpointError> {
    let mut shards = Vec::new();
    for (rank, first) in (0..ROWS).step_by(num_rows).enumerate() {
        let item = WriteItem {
            name: "model/a".to_owned(),
            dtype: Dtype::U8,
            shape: vec![ROWS, COLUMNS],
            slice: rows(first, num_rows),
        };
        let file = format!("rank{rank:05}-{step:x}.safetensors");
        let elements = Rows { step, first };
        shards.push(write_shard(
            store,
            &step_dir(step),
            &file,
            &[item],
            &elements,
        )?);
    }
    let state = TrainState {
        step,
        samples_seen: 0,
        seed: 0,
        world_size: ROWS / num_rows,
        config: String::new(),
        extra_state: serde_json::Value::Null,
    };
    commit(store, state, shards)
}

/// Reads a slice and compares every element.
fn check(checkpoint: &Checkpoint, slice: Slice) -> Result<(), CheckpointError> {
    let first = slice.region.offsets[0] * COLUMNS + slice.flat.as_ref().map_or(0, |f| f.start);
    let mut found = vec![0; slice.num_elements()];
    let request = ReadRequest {
        name: "model/a".to_owned(),
        slice,
    };
    checkpoint.read(&[request], |_, start, bytes| {
        found[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    })?;
    let step = checkpoint.state().unwrap().step;
    let is_right = |(i, &b): (usize, &u8)| b == byte(step, first + i);
    assert!(found.iter().enumerate().all(is_right), "step {step}");
    Ok(())
}

/// The contract of every store.
fn check_files(store: &dyn Store) {
    let none: Vec<String> = Vec::new();
    assert_eq!(store.list("").unwrap(), none);
    assert_eq!(store.size("a").unwrap(), None);
    store.remove("a").unwrap();
    store.remove_dir("a").unwrap();
    assert!(store.read("a", 0..0).is_err() && store.read("a", 0..1).is_err());

    for text in ["first", "the second"] {
        store.put("step-1/a", text.as_bytes()).unwrap();
        let size = text.len() as u64;
        assert_eq!(store.size("./step-1/a").unwrap(), Some(size));
        assert_eq!(store.read("step-1/a", 0..size).unwrap(), text.as_bytes());
        for range in [0..size + 1, size..size + 1, size + 5..size + 9, 0..1 << 60] {
            let error = store.read("step-1/a", range).unwrap_err();
            let kind = io::ErrorKind::UnexpectedEof;
            assert!(
                matches!(&error, CheckpointError::Io { source, .. } if source.kind() == kind),
                "{error}"
            );
        }
        assert_eq!(store.read("step-1/a", size..size).unwrap(), b"");
    }
    assert_eq!(store.read("step-1/a", 4..7).unwrap(), b"sec");

    store.create("step-10/empty").unwrap().finish().unwrap();
    assert_eq!(store.size("step-10/empty").unwrap(), Some(0));
    let mut writer = store.create("step-10/b").unwrap();
    let written: Vec<u8> = (0..10_000_000).map(|at| byte(7, at)).collect();
    (0..7).for_each(|_| writer.write(&written).unwrap());
    writer.finish().unwrap();
    assert_eq!(store.size("step-10/b").unwrap(), Some(70_000_000));
    let ranges: Vec<_> = (0..70)
        .map(|n| n * 1_000_000..n * 1_000_000 + 100)
        .collect();
    let mut num_read = 0;
    let mut each = |bytes: Vec<u8>| {
        let start = num_read * 1_000_000 % written.len();
        assert_eq!(bytes, written[start..start + 100]);
        num_read += 1;
        Ok(())
    };
    store.read_each("step-10/b", &ranges, &mut each).unwrap();
    assert_eq!(num_read, ranges.len());

    store.put("z", b"z").unwrap();
    assert_eq!(store.list("").unwrap(), ["step-1", "step-10", "z"]);
    assert_eq!(store.list(".").unwrap(), ["step-1", "step-10", "z"]);
    assert_eq!(store.list("step-10").unwrap(), ["b", "empty"]);
    store.remove_dir("step-1").unwrap();
    assert_eq!(store.list("").unwrap(), ["step-10", "z"]);
    store.remove("z").unwrap();
    store.remove_dir("step-10").unwrap();
    // A file system may keep the empty directory.
    assert_eq!(store.list("step-10").unwrap(), none);
}

/// The contract of checkpoints in every store.
fn check_checkpoints(store: &Arc<dyn Store>) {
    assert_eq!(latest(&**store).unwrap(), None);
    for step in [1, 2, 3] {
        save(&**store, step, 5).unwrap();
    }
    assert_eq!(latest(&**store).unwrap().as_deref(), Some("step-3"));
    let checkpoint = Checkpoint::open(Arc::clone(store), "step-3").unwrap();
    let mut num_bytes = 0;
    checkpoint.verify(|bytes| num_bytes += bytes).unwrap();
    assert!(num_bytes > (ROWS * COLUMNS) as u64);
    check(&checkpoint, rows(0, ROWS)).unwrap();
    // A slice across the ranks that wrote it, and a few elements alone.
    check(&checkpoint, rows(3, 4)).unwrap();
    let few = Slice {
        flat: Some(5_000_000..5_000_321),
        ..rows(2, 8)
    };
    check(&checkpoint, few).unwrap();

    // The remainder of an interrupted save is ignored, and deleted.
    store.remove("step-1/manifest.json").unwrap();
    save(&**store, 4, 2).unwrap();
    retain(&**store, 4, 2, None).unwrap();
    assert_eq!(store.list("").unwrap(), ["step-3", "step-4"]);
    let checkpoint = Checkpoint::open(Arc::clone(store), "step-4").unwrap();
    check(&checkpoint, rows(0, ROWS)).unwrap();
    check_flipped_bits(store, "step-4");
}

fn check_flipped_bits(store: &Arc<dyn Store>, dir: &str) {
    for (number, name) in store.list(dir).unwrap().iter().enumerate() {
        let path = format!("{dir}/{name}");
        let size = store.size(&path).unwrap().unwrap();
        let bytes = store.read(&path, 0..size).unwrap();
        let mut corrupted = bytes.clone();
        corrupted[bytes.len() * (number + 1) / 9] ^= 1 << number;
        store.put(&path, &corrupted).unwrap();
        let read = Checkpoint::open(Arc::clone(store), dir).and_then(|c| c.verify(|_| ()));
        let error = read.unwrap_err();
        assert!(
            matches!(error, CheckpointError::Corrupted { .. }),
            "{error}"
        );
        assert!(error.to_string().contains(name), "{error}");
        store.put(&path, &bytes).unwrap();
    }
    let checkpoint = Checkpoint::open(Arc::clone(store), dir).unwrap();
    checkpoint.verify(|_| ()).unwrap();
}

#[test]
fn a_directory_fulfills_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    check_files(&LocalStore::new(dir.path().join("files")));
    let store: Arc<dyn Store> = Arc::new(LocalStore::new(dir.path().join("checkpoints")));
    check_checkpoints(&store);
}

#[test]
fn a_bucket_fulfills_the_contract() {
    with_server(|_, port| {
        check_files(&open("files", port));
        check_files(&open("", port));
        let store: Arc<dyn Store> = Arc::new(open("some/checkpoints", port));
        check_checkpoints(&store);
        assert_eq!(
            store.describe("./step-4"),
            format!("s3://{BUCKET}/some/checkpoints/step-4")
        );
    });
}

/// A lease that is renewed all the time, and one that is never renewed while a test runs.
const SHORT: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(3600);

#[test]
fn a_bucket_has_one_owner() {
    with_server(|_, port| {
        let store = |lease| open("run", port).with_lease(lease);
        let claim = |lease, run, epoch| {
            Ownership::claim(&store(lease), Owner::this_process(run, epoch).unwrap())
        };
        let first = claim(SHORT, "a", 1).unwrap();
        let rejected = claim(Duration::from_secs(60), "b", 0).unwrap_err();
        assert!(rejected.to_string().contains("run `a`"), "{rejected}");
        first.check(&store(SHORT)).unwrap();
        // Neither of these two waits for the other's lease to end.
        let newer = claim(LONG, "a", 2).unwrap();
        let fenced = first.check(&store(SHORT)).unwrap_err();
        assert!(matches!(fenced, CheckpointError::Fenced { .. }), "{fenced}");
        drop(first);
        newer.check(&store(LONG)).unwrap();
        drop(newer);
        let killed = claim(LONG, "b", 0).unwrap();
        std::mem::forget(killed);
        claim(SHORT, "c", 0).unwrap().check(&store(SHORT)).unwrap();
    });
}

/// Neither during the upload nor after it was aborted.
#[test]
fn an_unfinished_file_is_invisible() {
    with_server(|server, port| {
        let store = open("", port);
        let mut writer = store.create("step-1/a").unwrap();
        (0..20).for_each(|_| writer.write(&[7; 5 << 20]).unwrap());
        let uploads = format!("/{BUCKET}?uploads");
        assert!(server.send("GET", &uploads).contains("<Key>step-1/a</Key>"));
        assert_eq!(store.size("step-1/a").unwrap(), None);
        assert!(store.list("").unwrap().is_empty());
        drop(writer);
        assert!(!server.send("GET", &uploads).contains("<Key>"));
        assert!(store.list("").unwrap().is_empty());
    });
}

/// A small slice takes a few requests, not a download of the file.
#[test]
fn reads_transfer_only_the_needed_blocks() {
    with_server(|server, port| {
        let store: Arc<dyn Store> = Arc::new(open("", port));
        server.requests();
        save(&*store, 1, 5).unwrap();
        let saving = server.requests();
        let checkpoint = Checkpoint::open(Arc::clone(&store), "step-1").unwrap();
        let opening = server.requests();
        check(&checkpoint, rows(4, 2)).unwrap();
        let reading = server.requests();
        println!(
            "{} requests to save two shards of 40 MiB, {} to open, {} to read 16 of 80 MiB",
            saving.len(),
            opening.len(),
            reading.len()
        );
        // The two rows are in two files, and each spans three blocks.
        assert_eq!(reading.len(), 6, "{reading:?}");
        assert_eq!(opening.len(), 2, "{opening:?}");
        // Each file takes four requests (create, two parts, complete); then the manifest and a listing.
        assert_eq!(saving.len(), 10, "{saving:?}");
    });
}

#[test]
fn a_store_is_shared_by_threads() {
    with_server(|_, port| {
        let store = open("", port);
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let store = &store;
                scope.spawn(move || {
                    let path = format!("file-{thread}");
                    store.put(&path, &[thread; 100]).unwrap();
                    assert_eq!(store.read(&path, 0..100).unwrap(), [thread; 100]);
                });
            }
        });
        assert_eq!(store.list("").unwrap().len(), 4);
    });
}

fn error_kind(error: CheckpointError) -> RemoteErrorKind {
    assert!(error.to_string().contains("s3://"), "{error}");
    println!("{error}");
    match error {
        CheckpointError::Remote { kind, .. } => kind,
        other => panic!("{other}"),
    }
}

#[test]
#[ignore = "full: waits for the time limits of the client, about a minute"]
fn a_killed_server_is_reported_in_time_and_the_next_save_succeeds() {
    with_server(|server, port| {
        let store = open("jobs", port);
        save(&store, 1, 5).unwrap();
        // The server dies in the middle of an upload.
        let mut writer = store.create("step-2/a").unwrap();
        (0..8).for_each(|_| writer.write(&[7; 5 << 20]).unwrap());
        server.kill();
        let began = Instant::now();
        let error = (0..40).try_for_each(|_| writer.write(&[7; 5 << 20]));
        let error = error.and_then(|()| writer.finish()).unwrap_err();
        assert_eq!(error_kind(error), RemoteErrorKind::Unreachable);
        assert!(began.elapsed() < TIME_LIMIT, "{:?}", began.elapsed());
        let began = Instant::now();
        let error = latest(&store).unwrap_err();
        assert_eq!(error_kind(error), RemoteErrorKind::Unreachable);
        assert!(began.elapsed() < TIME_LIMIT, "{:?}", began.elapsed());

        *server = Server::start(&python().unwrap(), port);
        save(&store, 3, 5).unwrap();
        assert_eq!(latest(&store).unwrap().as_deref(), Some("step-3"));
    });
}

/// The server accepts connections and never responds.
#[test]
#[ignore = "full: waits for the time limits of the client, about a minute"]
fn requests_to_a_silent_server_time_out() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = open("", silent.local_addr().unwrap().port());
    let began = Instant::now();
    let error = store.put("a", b"a").unwrap_err();
    assert_eq!(error_kind(error), RemoteErrorKind::Unreachable);
    assert!(began.elapsed() < TIME_LIMIT, "{:?}", began.elapsed());
}

#[test]
fn a_missing_bucket_is_reported() {
    with_server(|_, port| {
        let store = ObjectStore::new("elsewhere", "a", variables(port)).unwrap();
        let error = latest(&store).unwrap_err();
        assert_eq!(error_kind(error), RemoteErrorKind::NoBucket);
        let error = save(&store, 1, 5).unwrap_err();
        assert_eq!(error_kind(error), RemoteErrorKind::NoBucket);
    });
}

#[test]
fn missing_credentials_are_reported() {
    let is_key = |name: &str| name.ends_with("KEY_ID") || name.ends_with("ACCESS_KEY");
    let mut variables = variables(free_port());
    variables.retain(|(name, _)| !is_key(name));
    // The client requests credentials from the metadata service, which does not run.
    let metadata = format!("http://127.0.0.1:{}", free_port());
    variables.push(("AWS_METADATA_ENDPOINT".to_owned(), metadata));
    let store = ObjectStore::new(BUCKET, "", variables).unwrap();
    let began = Instant::now();
    let error = store.put("a", b"a").unwrap_err();
    assert_eq!(error_kind(error), RemoteErrorKind::NoCredentials);
    assert!(began.elapsed() < TIME_LIMIT, "{:?}", began.elapsed());
}

#[test]
fn invalid_locations_are_rejected_when_opened() {
    let mut plain = variables(1);
    plain.retain(|(name, _)| name != "AWS_ALLOW_HTTP");
    let error = ObjectStore::new(BUCKET, "", plain).unwrap_err();
    assert!(error.to_string().contains("AWS_ALLOW_HTTP=true"), "{error}");
    let error = ObjectStore::new(BUCKET, "a/../b", variables(1)).unwrap_err();
    assert!(matches!(error, CheckpointError::Location { .. }), "{error}");
    let error = store::open("gs://mine/a".as_ref()).unwrap_err();
    assert!(error.to_string().contains("s3://bucket/prefix"), "{error}");
}
