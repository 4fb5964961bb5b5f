//! A step that is saved twice in a row, for example by a job that is preempted right after a save: the second save is
//! complete, however long rank 0 takes to clean up after the first one.

use std::error::Error;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use trainyard_checkpoint::store::{self, Writer};
use trainyard_checkpoint::{Checkpoint, Result as Stored, Store, TrainState, step_dir};
use trainyard_config::Dtype;
use trainyard_conformance::training::{Session, debug_llama, divided};
use trainyard_conformance::{Outcome, Rank};
use trainyard_train::checkpoint::{Destination, Saver};

use super::meshes::shared_folder;

const STEP: u64 = 7;

/// How long rank 0 waits for new files during its cleanup.
const DAWDLES: Duration = Duration::from_millis(500);

pub fn is_whole(rank: &Rank) -> Outcome {
    let folder = shared_folder(rank)?;
    let config = divided(&debug_llama(Dtype::Float32), rank.size(), 1);
    let world = rank.join_config(&config)?;
    let session = Session::new(&config, &world)?;
    let dawdling: Arc<dyn Store> = Arc::new(Dawdling(store::open(&folder)?));
    let place = Destination {
        store: dawdling,
        keep: 1,
        is_async: true,
        is_durable: true,
        owner: None,
    };
    let mut saver = Saver::new(&world)?;
    for _ in 0..2 {
        saver.save(
            &session.trainer,
            &world,
            state(rank),
            std::slice::from_ref(&place),
        )?;
    }
    saver.finish();
    rank.barrier()?;
    whole(&place.store)
}

fn whole(store: &Arc<dyn Store>) -> Result<(), Box<dyn Error>> {
    let checkpoint = Checkpoint::open(Arc::clone(store), &step_dir(STEP))?;
    for file in checkpoint.manifest().files.keys() {
        let path = format!("{}/{file}", step_dir(STEP));
        assert!(store.size(&path)?.is_some(), "{file} was taken away");
    }
    Ok(())
}

fn state(rank: &Rank) -> TrainState {
    TrainState {
        step: STEP,
        samples_seen: 0,
        seed: 0,
        world_size: rank.size(),
        config: String::new(),
        extra_state: serde_json::Value::Null,
    }
}

/// A store whose `list` waits until other ranks have written more.
#[derive(Debug)]
struct Dawdling(Arc<dyn Store>);

impl Store for Dawdling {
    fn describe(&self, path: &str) -> String {
        self.0.describe(path)
    }

    fn create(&self, path: &str) -> Stored<Box<dyn Writer>> {
        self.0.create(path)
    }

    fn put(&self, path: &str, bytes: &[u8]) -> Stored<()> {
        self.0.put(path, bytes)
    }

    fn size(&self, path: &str) -> Stored<Option<u64>> {
        self.0.size(path)
    }

    fn read(&self, path: &str, range: Range<u64>) -> Stored<Vec<u8>> {
        self.0.read(path, range)
    }

    fn list(&self, folder: &str) -> Stored<Vec<String>> {
        let (began, before) = (Instant::now(), self.0.list(folder)?);
        loop {
            let names = self.0.list(folder)?;
            if names.len() > before.len() || began.elapsed() > DAWDLES {
                return Ok(names);
            }
            std::thread::yield_now();
        }
    }

    fn remove(&self, path: &str) -> Stored<()> {
        self.0.remove(path)
    }

    fn remove_dir(&self, folder: &str) -> Stored<()> {
        self.0.remove_dir(folder)
    }
}
