//! A bucket keeps every promise that a folder keeps, and tells what is wrong with its server.

mod bucket;

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bucket::{BUCKET, Server, free_port, open, python, variables};
use trainyard_checkpoint::store::{self, LocalStore, ObjectStore, Trouble};
use trainyard_checkpoint::{
    Checkpoint, CheckpointError, Dtype, Elements, Part, Store, TrainState, Want, commit, latest,
    retain, step_folder, write_shard,
};
use trainyard_mesh::{Region, Slice};

/// A dead server is given up after this long, on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(75);
/// Rows of a tensor; each rank writes some of them.
const ROWS: usize = 10;
/// A shard of two ranks has 40 MiB: more than a part of an upload.
const COLUMNS: usize = 8 << 20;

/// Runs with a server, where there can be one.
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

/// Rows from `first` on of a tensor that tells its step.
struct Rows {
    step: u64,
    first: usize,
}

impl Elements for Rows {
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

/// Saves as ranks would that have `num_rows` of the rows each.
fn save(store: &dyn Store, step: u64, num_rows: usize) -> Result<String, CheckpointError> {
    let mut shards = Vec::new();
    for (rank, first) in (0..ROWS).step_by(num_rows).enumerate() {
        let part = Part {
            name: "model/a".to_owned(),
            dtype: Dtype::U8,
            shape: vec![ROWS, COLUMNS],
            slice: rows(first, num_rows),
        };
        let file = format!("rank{rank:05}-{step:x}.safetensors");
        let elements = Rows { step, first };
        shards.push(write_shard(
            store,
            &step_folder(step),
            &file,
            &[part],
            &elements,
        )?);
    }
    let state = TrainState {
        step,
        samples_seen: 0,
        seed: 0,
        world_size: ROWS / num_rows,
        config: String::new(),
        schedule: serde_json::Value::Null,
    };
    commit(store, state, shards)
}

/// Reads some elements and compares each.
fn check(checkpoint: &Checkpoint, slice: Slice) -> Result<(), CheckpointError> {
    let first = slice.region.offsets[0] * COLUMNS + slice.flat.as_ref().map_or(0, |f| f.start);
    let mut found = vec![0; slice.num_elements()];
    let want = Want {
        name: "model/a".to_owned(),
        slice,
    };
    checkpoint.read(&[want], |_, start, bytes| {
        found[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    })?;
    let step = checkpoint.state().unwrap().step;
    let is_right = |(i, &b): (usize, &u8)| b == byte(step, first + i);
    assert!(found.iter().enumerate().all(is_right), "step {step}");
    Ok(())
}

/// What every store must do, whatever it is.
fn keeps_files(store: &dyn Store) {
    let none: Vec<String> = Vec::new();
    assert_eq!(store.list("").unwrap(), none);
    assert_eq!(store.size("a").unwrap(), None);
    store.remove("a").unwrap();
    store.remove_folder("a").unwrap();
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
    let mut sink = store.create("step-10/b").unwrap();
    let part: Vec<u8> = (0..10_000_000).map(|at| byte(7, at)).collect();
    (0..7).for_each(|_| sink.write(&part).unwrap());
    sink.finish().unwrap();
    assert_eq!(store.size("step-10/b").unwrap(), Some(70_000_000));
    let ranges: Vec<_> = (0..70)
        .map(|n| n * 1_000_000..n * 1_000_000 + 100)
        .collect();
    let mut num_read = 0;
    let mut each = |bytes: Vec<u8>| {
        let start = num_read * 1_000_000 % part.len();
        assert_eq!(bytes, part[start..start + 100]);
        num_read += 1;
        Ok(())
    };
    store.read_each("step-10/b", &ranges, &mut each).unwrap();
    assert_eq!(num_read, ranges.len());

    store.put("z", b"z").unwrap();
    assert_eq!(store.list("").unwrap(), ["step-1", "step-10", "z"]);
    assert_eq!(store.list(".").unwrap(), ["step-1", "step-10", "z"]);
    assert_eq!(store.list("step-10").unwrap(), ["b", "empty"]);
    store.remove_folder("step-1").unwrap();
    assert_eq!(store.list("").unwrap(), ["step-10", "z"]);
    store.remove("z").unwrap();
    store.remove_folder("step-10").unwrap();
    // A folder that is empty may stay in a file system, not what was in it.
    assert_eq!(store.list("step-10").unwrap(), none);
}

/// What every checkpoint must be, wherever it lies.
fn keeps_checkpoints(store: &Arc<dyn Store>) {
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
    // Across the ranks that wrote it, and a few elements alone.
    check(&checkpoint, rows(3, 4)).unwrap();
    let few = Slice {
        flat: Some(5_000_000..5_000_321),
        ..rows(2, 8)
    };
    check(&checkpoint, few).unwrap();

    // What a save was killed over does not count, and goes.
    store.remove("step-1/manifest.json").unwrap();
    save(&**store, 4, 2).unwrap();
    retain(&**store, 4, 2).unwrap();
    assert_eq!(store.list("").unwrap(), ["step-3", "step-4"]);
    let checkpoint = Checkpoint::open(Arc::clone(store), "step-4").unwrap();
    check(&checkpoint, rows(0, ROWS)).unwrap();
    finds_flipped_bits(store, "step-4");
}

fn finds_flipped_bits(store: &Arc<dyn Store>, folder: &str) {
    for (number, name) in store.list(folder).unwrap().iter().enumerate() {
        let path = format!("{folder}/{name}");
        let size = store.size(&path).unwrap().unwrap();
        let bytes = store.read(&path, 0..size).unwrap();
        let mut damaged = bytes.clone();
        damaged[bytes.len() * (number + 1) / 9] ^= 1 << number;
        store.put(&path, &damaged).unwrap();
        let read = Checkpoint::open(Arc::clone(store), folder).and_then(|c| c.verify(|_| ()));
        let error = read.unwrap_err();
        assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
        store.put(&path, &bytes).unwrap();
    }
    let checkpoint = Checkpoint::open(Arc::clone(store), folder).unwrap();
    checkpoint.verify(|_| ()).unwrap();
}

#[test]
fn a_folder_keeps_what_it_is_given() {
    let folder = tempfile::tempdir().unwrap();
    keeps_files(&LocalStore::new(folder.path().join("files")));
    let store: Arc<dyn Store> = Arc::new(LocalStore::new(folder.path().join("checkpoints")));
    keeps_checkpoints(&store);
}

#[test]
fn a_bucket_keeps_what_it_is_given() {
    with_server(|_, port| {
        keeps_files(&open("files", port));
        keeps_files(&open("", port));
        let store: Arc<dyn Store> = Arc::new(open("some/checkpoints", port));
        keeps_checkpoints(&store);
        assert_eq!(
            store.describe("./step-4"),
            format!("s3://{BUCKET}/some/checkpoints/step-4")
        );
    });
}

/// Neither while it is written nor after it was given up.
#[test]
fn an_unfinished_file_is_invisible() {
    with_server(|server, port| {
        let store = open("", port);
        let mut sink = store.create("step-1/a").unwrap();
        (0..20).for_each(|_| sink.write(&[7; 5 << 20]).unwrap());
        let uploads = format!("/{BUCKET}?uploads");
        assert!(server.ask("GET", &uploads).contains("<Key>step-1/a</Key>"));
        assert_eq!(store.size("step-1/a").unwrap(), None);
        assert!(store.list("").unwrap().is_empty());
        drop(sink);
        assert!(!server.ask("GET", &uploads).contains("<Key>"));
        assert!(store.list("").unwrap().is_empty());
    });
}

/// A few elements cost a few requests, and not the file.
#[test]
fn only_what_is_needed_is_read() {
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
        // Each of the rows lies in a file of its own and in three blocks, of which it fills one.
        assert_eq!(reading.len(), 6, "{reading:?}");
        assert_eq!(opening.len(), 2, "{opening:?}");
        // Each file is begun, has two parts and is finished; then the manifest, and a look for strangers.
        assert_eq!(saving.len(), 10, "{saving:?}");
    });
}

#[test]
fn any_thread_may_ask() {
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

fn trouble(error: CheckpointError) -> Trouble {
    assert!(error.to_string().contains("s3://"), "{error}");
    println!("{error}");
    match error {
        CheckpointError::Remote { trouble, .. } => trouble,
        other => panic!("{other}"),
    }
}

#[test]
fn a_killed_server_is_told_in_time_and_the_next_save_works() {
    with_server(|server, port| {
        let store = open("jobs", port);
        save(&store, 1, 5).unwrap();
        // In the middle of a file.
        let mut sink = store.create("step-2/a").unwrap();
        (0..8).for_each(|_| sink.write(&[7; 5 << 20]).unwrap());
        server.kill();
        let began = Instant::now();
        let error = (0..40).try_for_each(|_| sink.write(&[7; 5 << 20]));
        let error = error.and_then(|()| sink.finish()).unwrap_err();
        assert_eq!(trouble(error), Trouble::Unreachable);
        assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
        let began = Instant::now();
        assert_eq!(trouble(latest(&store).unwrap_err()), Trouble::Unreachable);
        assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());

        *server = Server::start(&python().unwrap(), port);
        save(&store, 3, 5).unwrap();
        assert_eq!(latest(&store).unwrap().as_deref(), Some("step-3"));
    });
}

/// One that takes connections and says nothing.
#[test]
fn a_silent_server_is_given_up() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = open("", silent.local_addr().unwrap().port());
    let began = Instant::now();
    let error = store.put("a", b"a").unwrap_err();
    assert_eq!(trouble(error), Trouble::Unreachable);
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
}

#[test]
fn a_bucket_that_is_not_there_is_told() {
    with_server(|_, port| {
        let store = ObjectStore::new("elsewhere", "a", variables(port)).unwrap();
        assert_eq!(trouble(latest(&store).unwrap_err()), Trouble::NoBucket);
        assert_eq!(trouble(save(&store, 1, 5).unwrap_err()), Trouble::NoBucket);
    });
}

#[test]
fn missing_keys_are_told() {
    let is_key = |name: &str| name.ends_with("KEY_ID") || name.ends_with("ACCESS_KEY");
    let mut variables = variables(free_port());
    variables.retain(|(name, _)| !is_key(name));
    // Where the keys of a machine are asked for: nobody is there.
    let nobody = format!("http://127.0.0.1:{}", free_port());
    variables.push(("AWS_METADATA_ENDPOINT".to_owned(), nobody));
    let store = ObjectStore::new(BUCKET, "", variables).unwrap();
    let began = Instant::now();
    let error = store.put("a", b"a").unwrap_err();
    assert_eq!(trouble(error), Trouble::NoCredentials);
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
}

#[test]
fn what_cannot_be_opened_is_told_at_once() {
    let mut plain = variables(1);
    plain.retain(|(name, _)| name != "AWS_ALLOW_HTTP");
    let error = ObjectStore::new(BUCKET, "", plain).unwrap_err();
    assert!(error.to_string().contains("AWS_ALLOW_HTTP=true"), "{error}");
    let error = ObjectStore::new(BUCKET, "a/../b", variables(1)).unwrap_err();
    assert!(matches!(error, CheckpointError::Place { .. }), "{error}");
    let error = store::open("gs://mine/a".as_ref()).unwrap_err();
    assert!(error.to_string().contains("s3://bucket/prefix"), "{error}");
}
