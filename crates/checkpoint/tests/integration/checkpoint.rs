//! Checkpoints load on any mesh, and corrupted or unsupported ones are rejected by file name.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use trainyard_checkpoint::{
    Checkpoint, CheckpointError, Dtype, ElementSource, ReadRequest, Store, TrainState, WriteItem,
    commit, latest, retain, step_dir, store, write_shard,
};
use trainyard_mesh::{Axis, Dim, Layout, Mesh, Placement, Slice, overlaps, slice_of};

/// All bytes of a tensor whose bytes depend on their position.
fn tensor_bytes(shape: &[usize], dtype: Dtype) -> Vec<u8> {
    let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    (0..length).map(|i| (i * 131 % 251) as u8).collect()
}

/// The bytes of a slice of such a tensor.
fn slice_bytes(shape: &[usize], slice: &Slice, dtype: Dtype) -> Vec<u8> {
    let (all, width) = (tensor_bytes(shape, dtype), dtype.bitsize() / 8);
    let mut bytes = vec![0; slice.num_elements() * width];
    for overlap in overlaps(&Slice::full(shape), slice, shape) {
        let (from, to, length) = (
            overlap.from * width,
            overlap.to * width,
            overlap.length * width,
        );
        bytes[to..to + length].copy_from_slice(&all[from..from + length]);
    }
    bytes
}

/// Items whose elements are in memory.
struct InMemory(Vec<Vec<u8>>);

impl ElementSource for InMemory {
    fn copy(&self, index: usize, start: usize, into: &mut [u8]) -> io::Result<()> {
        into.copy_from_slice(&self.0[index][start..start + into.len()]);
        Ok(())
    }
}

fn state(step: u64) -> TrainState {
    TrainState {
        step,
        samples_seen: step * 8,
        seed: 3,
        world_size: 2,
        config: "[training]\nsteps = 20\n".into(),
        extra_state: serde_json::json!({ "loss_scale": 2.0 }),
    }
}

const SHAPES: [(&str, Dtype, &[usize]); 4] = [
    ("model/a", Dtype::F32, &[6, 5]),
    ("model/b", Dtype::BF16, &[7]),
    ("optimizer/exp_avg.a", Dtype::F64, &[6, 5]),
    ("optimizer/step.a", Dtype::F32, &[]),
];

fn layout() -> Layout {
    Layout::default()
        .with(Axis::Tp, Placement::Shard(Dim(0)))
        .with(Axis::DpShard, Placement::Flat)
}

fn slice(shape: &[usize], mesh: &Mesh, rank: usize) -> Slice {
    if shape.is_empty() {
        Slice::full(shape)
    } else {
        slice_of(shape, &layout(), mesh, rank).unwrap()
    }
}

fn mesh(dp_shard: usize, tp: usize) -> Mesh {
    Mesh::new(&[(Axis::DpShard, dp_shard), (Axis::Tp, tp)]).unwrap()
}

/// Saves as the ranks of `mesh` would.
fn save(store: &dyn Store, step: u64, mesh: &Mesh) -> Result<String, CheckpointError> {
    let mut shards = Vec::new();
    for rank in 0..mesh.world_size() {
        let items = SHAPES.iter().map(|(name, dtype, shape)| WriteItem {
            name: (*name).to_owned(),
            dtype: *dtype,
            shape: shape.to_vec(),
            slice: slice(shape, mesh, rank),
        });
        // Rank 0 alone writes replicated tensors.
        let is_own = |item: &WriteItem| rank == 0 || !item.shape.is_empty();
        let items: Vec<WriteItem> = items.filter(is_own).collect();
        let elements = items
            .iter()
            .map(|item| slice_bytes(&item.shape, &item.slice, item.dtype))
            .collect();
        let file = format!("rank{rank:05}-{step:x}.safetensors");
        shards.push(write_shard(
            store,
            &step_dir(step),
            &file,
            &items,
            &InMemory(elements),
        )?);
    }
    commit(store, state(step), shards)
}

fn read(checkpoint: &Checkpoint, mesh: &Mesh, rank: usize) -> Result<(), CheckpointError> {
    let requests: Vec<ReadRequest> = SHAPES
        .iter()
        .map(|(name, _, shape)| ReadRequest {
            name: (*name).to_owned(),
            slice: slice(shape, mesh, rank),
        })
        .collect();
    let mut found: Vec<Vec<u8>> = SHAPES
        .iter()
        .zip(&requests)
        .map(|((_, dtype, _), request)| {
            vec![0xff; request.slice.num_elements() * dtype.bitsize() / 8]
        })
        .collect();
    checkpoint.read(&requests, |index, start, bytes| {
        found[index][start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    })?;
    for (((name, dtype, shape), request), found) in SHAPES.iter().zip(&requests).zip(found) {
        assert_eq!(
            found,
            slice_bytes(shape, &request.slice, *dtype),
            "{name} on rank {rank}"
        );
    }
    Ok(())
}

fn open(dir: &Path, step: u64) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(store::open(dir)?, &step_dir(step))
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let items = fs::read_dir(dir).unwrap();
    let mut paths: Vec<PathBuf> = items.map(|item| item.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn any_mesh_loads_what_any_other_saved() {
    let dir = tempfile::tempdir().unwrap();
    let store = store::open(dir.path()).unwrap();
    let meshes = [mesh(1, 1), mesh(4, 1), mesh(2, 2), mesh(1, 3), mesh(3, 2)];
    for (step, written) in meshes.iter().enumerate() {
        save(&*store, step as u64, written).unwrap();
        let checkpoint = open(dir.path(), step as u64).unwrap();
        assert_eq!(checkpoint.state(), Some(&state(step as u64)));
        for loading in &meshes {
            for rank in 0..loading.world_size() {
                read(&checkpoint, loading, rank).unwrap();
            }
        }
    }
}

#[test]
fn every_shard_is_a_valid_safetensors_file() {
    let dir = tempfile::tempdir().unwrap();
    save(&*store::open(dir.path()).unwrap(), 1, &mesh(1, 1)).unwrap();
    let path = &files(&dir.path().join("step-1"))[1];
    let bytes = fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(
        tensors.tensor("model/a").unwrap().data(),
        tensor_bytes(&[6, 5], Dtype::F32)
    );
}

#[test]
fn latest_finds_the_newest_complete_checkpoint_and_retain_deletes_old_ones() {
    let dir = tempfile::tempdir().unwrap();
    let store = store::open(dir.path()).unwrap();
    assert_eq!(latest(&*store).unwrap(), None);
    for step in [1, 2, 3, 4] {
        save(&*store, step, &mesh(2, 1)).unwrap();
    }
    // Directories without a manifest are remainders of interrupted saves.
    fs::remove_file(dir.path().join("step-4/manifest.json")).unwrap();
    fs::remove_file(dir.path().join("step-1/manifest.json")).unwrap();
    assert_eq!(latest(&*store).unwrap().as_deref(), Some("step-3"));
    retain(&*store, 3, 1, None).unwrap();
    let names: Vec<_> = files(dir.path())
        .iter()
        .map(|p| p.file_name().unwrap().to_owned())
        .collect();
    assert_eq!(names, ["step-3", "step-4"]);
}

#[test]
fn checkpoints_of_another_job_are_not_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let store = store::open(dir.path()).unwrap();
    for step in [1, 2, 3, 4] {
        save(&*store, step, &mesh(2, 1)).unwrap();
    }
    fs::write(dir.path().join("step-3/manifest.json"), "damaged").unwrap();
    retain(&*store, 4, 1, Some(&|state| state.step != 1)).unwrap();
    let names: Vec<_> = files(dir.path())
        .iter()
        .map(|p| p.file_name().unwrap().to_owned())
        .collect();
    assert_eq!(names, ["step-1", "step-3", "step-4"]);
}

#[test]
fn a_step_can_be_saved_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = store::open(dir.path()).unwrap();
    save(&*store, 5, &mesh(4, 1)).unwrap();
    fs::write(
        dir.path().join("step-5/rank00000-old.safetensors"),
        "left over",
    )
    .unwrap();
    save(&*store, 5, &mesh(2, 1)).unwrap();
    assert_eq!(files(&dir.path().join("step-5")).len(), 3);
    read(&open(dir.path(), 5).unwrap(), &mesh(1, 1), 0).unwrap();
}

/// Verifies a checkpoint completely and reads all of its tensors.
fn check(dir: &Path) -> Result<(), CheckpointError> {
    let checkpoint = open(dir, 1)?;
    checkpoint.verify(|_| ())?;
    read(&checkpoint, &mesh(1, 1), 0)
}

/// Flips ten thousand single bits in the shards and the manifest.
#[test]
fn every_flipped_bit_is_detected_and_its_file_named() {
    let dir = tempfile::tempdir().unwrap();
    save(&*store::open(dir.path()).unwrap(), 1, &mesh(2, 1)).unwrap();
    check(dir.path()).unwrap();
    let paths = files(&dir.path().join("step-1"));
    let mut random = 0x2545_f491_4f6c_dd1du64;
    let is_full_run = std::env::var_os("TRAINYARD_FULL").is_some();
    for flip in 0..if is_full_run { 10_000 } else { 1_000 } {
        // Xorshift, so that every run flips the same bits.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let path = &paths[flip % paths.len()];
        let bytes = fs::read(path).unwrap();
        let (at, bit) = (random as usize % bytes.len(), (random >> 60) & 7);
        let mut corrupted = bytes.clone();
        corrupted[at] ^= 1 << bit;
        fs::write(path, &corrupted).unwrap();
        let error = check(dir.path()).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        fs::write(path, &bytes).unwrap();
    }
}

#[test]
fn truncated_and_swapped_files_are_detected() {
    let dir = tempfile::tempdir().unwrap();
    save(&*store::open(dir.path()).unwrap(), 1, &mesh(2, 1)).unwrap();
    let paths = files(&dir.path().join("step-1"));
    for path in &paths {
        let bytes = fs::read(path).unwrap();
        for length in [0, 1, bytes.len() / 2, bytes.len() - 1] {
            fs::write(path, &bytes[..length]).unwrap();
            let error = check(dir.path()).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        fs::write(path, &bytes).unwrap();
    }
    let (first, second) = (&paths[1], &paths[2]);
    let aside = dir.path().join("aside");
    fs::rename(first, &aside).unwrap();
    fs::rename(second, first).unwrap();
    fs::rename(&aside, second).unwrap();
    let error = check(dir.path()).unwrap_err().to_string();
    assert!(error.contains("safetensors"), "{error}");
}

#[test]
fn missing_and_unexpected_tensors_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    save(&*store::open(dir.path()).unwrap(), 1, &mesh(1, 1)).unwrap();
    let checkpoint = open(dir.path(), 1).unwrap();
    let error = checkpoint.expect_names("model/", ["model/a", "model/c"].into_iter());
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("missing [model/c]") && error.contains("unexpected [model/b]"),
        "{error}"
    );
}

/// A store whose n-th modifying operation fails.
#[derive(Debug)]
struct Failing {
    inner: Arc<dyn Store>,
    left: std::sync::atomic::AtomicUsize,
}

impl Failing {
    fn next(&self) -> Result<(), CheckpointError> {
        let left = self.left.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
        match left {
            1 => Err(CheckpointError::Io {
                path: "here".to_owned(),
                source: io::Error::new(io::ErrorKind::StorageFull, "no space left"),
            }),
            _ => Ok(()),
        }
    }
}

impl Store for Failing {
    fn describe(&self, path: &str) -> String {
        self.inner.describe(path)
    }
    fn create(&self, path: &str) -> Result<Box<dyn store::Writer>, CheckpointError> {
        self.next()?;
        self.inner.create(path)
    }
    fn put(&self, path: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.next()?;
        self.inner.put(path, bytes)
    }
    fn size(&self, path: &str) -> Result<Option<u64>, CheckpointError> {
        self.inner.size(path)
    }
    fn read(&self, path: &str, range: std::ops::Range<u64>) -> Result<Vec<u8>, CheckpointError> {
        self.inner.read(path, range)
    }
    fn list(&self, dir: &str) -> Result<Vec<String>, CheckpointError> {
        self.inner.list(dir)
    }
    fn remove(&self, path: &str) -> Result<(), CheckpointError> {
        self.next()?;
        self.inner.remove(path)
    }
    fn remove_dir(&self, dir: &str) -> Result<(), CheckpointError> {
        self.next()?;
        self.inner.remove_dir(dir)
    }
}

/// Wherever a save fails, the previous or the new checkpoint is complete.
#[test]
fn a_failed_save_leaves_the_previous_checkpoint() {
    for fails_at in 1..12 {
        let dir = tempfile::tempdir().unwrap();
        let inner = store::open(dir.path()).unwrap();
        save(&*inner, 1, &mesh(2, 1)).unwrap();
        let failing = Failing {
            inner: Arc::clone(&inner),
            left: fails_at.into(),
        };
        let saved = save(&failing, 2, &mesh(2, 1)).and_then(|_| retain(&failing, 2, 1, None));
        let newest = latest(&*inner).unwrap().unwrap();
        let checkpoint = Checkpoint::open(Arc::clone(&inner), &newest).unwrap();
        checkpoint.verify(|_| ()).unwrap();
        read(&checkpoint, &mesh(1, 1), 0).unwrap();
        assert!(saved.is_err() || newest == "step-2");
        // The next save succeeds.
        save(&*inner, 3, &mesh(2, 1)).unwrap();
        assert_eq!(latest(&*inner).unwrap().as_deref(), Some("step-3"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Arbitrary bytes in place of a manifest or of a safetensors header are rejected without a panic.
    #[test]
    fn garbage_is_rejected(bytes in prop::collection::vec(any::<u8>(), 0..200), which in 0usize..2) {
        let dir = tempfile::tempdir().unwrap();
        let step = dir.path().join("step-1");
        fs::create_dir(&step).unwrap();
        match which {
            0 => fs::write(step.join("manifest.json"), &bytes).unwrap(),
            _ => fs::write(step.join("model.safetensors"), &bytes).unwrap(),
        }
        prop_assert!(open(dir.path(), 1).is_err());
    }
}
