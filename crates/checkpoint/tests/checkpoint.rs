//! What is saved comes back on any mesh; what is broken is refused, with the name of its file.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use trainyard_checkpoint::{
    Checkpoint, CheckpointError, Dtype, Elements, Part, Store, TrainState, Want, commit, latest,
    retain, step_folder, store, write_shard,
};
use trainyard_mesh::{Axis, Dim, Layout, Mesh, Placement, Slice, overlaps, slice_of};

/// The whole of a tensor of bytes that tell their places.
fn whole(shape: &[usize], dtype: Dtype) -> Vec<u8> {
    let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    (0..length).map(|i| (i * 131 % 251) as u8).collect()
}

/// A part of such a tensor.
fn cut(shape: &[usize], slice: &Slice, dtype: Dtype) -> Vec<u8> {
    let (all, width) = (whole(shape, dtype), dtype.bitsize() / 8);
    let mut part = vec![0; slice.num_elements() * width];
    for overlap in overlaps(&Slice::whole(shape), slice, shape) {
        let (from, to, length) = (
            overlap.from * width,
            overlap.to * width,
            overlap.length * width,
        );
        part[to..to + length].copy_from_slice(&all[from..from + length]);
    }
    part
}

/// Parts whose elements are in memory.
struct InMemory(Vec<Vec<u8>>);

impl Elements for InMemory {
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
        schedule: serde_json::json!({ "warmup_steps": 2 }),
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
    match shape.is_empty() {
        true => Slice::whole(shape),
        false => slice_of(shape, &layout(), mesh, rank).unwrap(),
    }
}

fn mesh(dp_shard: usize, tp: usize) -> Mesh {
    Mesh::new(&[(Axis::DpShard, dp_shard), (Axis::Tp, tp)]).unwrap()
}

/// Saves as the ranks of a mesh would.
fn save(store: &dyn Store, step: u64, mesh: &Mesh) -> Result<String, CheckpointError> {
    let mut shards = Vec::new();
    for rank in 0..mesh.world_size() {
        let parts = SHAPES.iter().map(|(name, dtype, shape)| Part {
            name: (*name).to_owned(),
            dtype: *dtype,
            shape: shape.to_vec(),
            slice: slice(shape, mesh, rank),
        });
        let is_own = |part: &Part| rank == 0 || !part.shape.is_empty();
        let parts: Vec<Part> = parts.filter(is_own).collect();
        let elements = parts
            .iter()
            .map(|p| cut(&p.shape, &p.slice, p.dtype))
            .collect();
        let file = format!("rank{rank:05}-{step:x}.safetensors");
        shards.push(write_shard(
            store,
            &step_folder(step),
            &file,
            &parts,
            &InMemory(elements),
        )?);
    }
    commit(store, state(step), shards)
}

fn read(checkpoint: &Checkpoint, mesh: &Mesh, rank: usize) -> Result<(), CheckpointError> {
    let wants: Vec<Want> = SHAPES
        .iter()
        .map(|(name, _, shape)| Want {
            name: (*name).to_owned(),
            slice: slice(shape, mesh, rank),
        })
        .collect();
    let mut found: Vec<Vec<u8>> = SHAPES
        .iter()
        .zip(&wants)
        .map(|((_, dtype, _), want)| vec![0xff; want.slice.num_elements() * dtype.bitsize() / 8])
        .collect();
    checkpoint.read(&wants, |index, start, bytes| {
        found[index][start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    })?;
    for (((name, dtype, shape), want), found) in SHAPES.iter().zip(&wants).zip(found) {
        assert_eq!(
            found,
            cut(shape, &want.slice, *dtype),
            "{name} on rank {rank}"
        );
    }
    Ok(())
}

fn open(folder: &Path, step: u64) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(store::open(folder)?, &step_folder(step))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let items = fs::read_dir(folder).unwrap();
    let mut paths: Vec<PathBuf> = items.map(|item| item.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn any_mesh_reads_what_any_other_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let store = store::open(folder.path()).unwrap();
    let meshes = [mesh(1, 1), mesh(4, 1), mesh(2, 2), mesh(1, 3), mesh(3, 2)];
    for (step, written) in meshes.iter().enumerate() {
        save(&*store, step as u64, written).unwrap();
        let checkpoint = open(folder.path(), step as u64).unwrap();
        assert_eq!(checkpoint.state(), Some(&state(step as u64)));
        for wanted in &meshes {
            for rank in 0..wanted.world_size() {
                read(&checkpoint, wanted, rank).unwrap();
            }
        }
    }
}

#[test]
fn every_file_is_plain_safetensors() {
    let folder = tempfile::tempdir().unwrap();
    save(&*store::open(folder.path()).unwrap(), 1, &mesh(1, 1)).unwrap();
    let path = &files(&folder.path().join("step-1"))[1];
    let bytes = fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(
        tensors.tensor("model/a").unwrap().data(),
        whole(&[6, 5], Dtype::F32)
    );
}

#[test]
fn the_newest_complete_one_is_found_and_old_ones_go() {
    let folder = tempfile::tempdir().unwrap();
    let store = store::open(folder.path()).unwrap();
    assert_eq!(latest(&*store).unwrap(), None);
    for step in [1, 2, 3, 4] {
        save(&*store, step, &mesh(2, 1)).unwrap();
    }
    // What a save was killed over.
    fs::remove_file(folder.path().join("step-4/manifest.json")).unwrap();
    fs::remove_file(folder.path().join("step-1/manifest.json")).unwrap();
    assert_eq!(latest(&*store).unwrap().as_deref(), Some("step-3"));
    retain(&*store, 3, 1).unwrap();
    let names: Vec<_> = files(folder.path())
        .iter()
        .map(|p| p.file_name().unwrap().to_owned())
        .collect();
    assert_eq!(names, ["step-3", "step-4"]);
}

#[test]
fn a_step_can_be_saved_again() {
    let folder = tempfile::tempdir().unwrap();
    let store = store::open(folder.path()).unwrap();
    save(&*store, 5, &mesh(4, 1)).unwrap();
    fs::write(
        folder.path().join("step-5/rank00000-old.safetensors"),
        "left over",
    )
    .unwrap();
    save(&*store, 5, &mesh(2, 1)).unwrap();
    assert_eq!(files(&folder.path().join("step-5")).len(), 3);
    read(&open(folder.path(), 5).unwrap(), &mesh(1, 1), 0).unwrap();
}

#[test]
fn version_1_is_still_read() {
    let folder = tempfile::tempdir().unwrap();
    let step = folder.path().join("step-7");
    fs::create_dir(&step).unwrap();
    let file = |name: &str, prefix: &str| {
        let own = SHAPES
            .iter()
            .filter(|(name, _, _)| name.starts_with(prefix));
        let data: BTreeMap<&str, (Dtype, &[usize], Vec<u8>)> = own
            .map(|(name, dtype, shape)| {
                (
                    &name[prefix.len()..],
                    (*dtype, *shape, whole(shape, *dtype)),
                )
            })
            .collect();
        let views = data.iter().map(|(name, (dtype, shape, bytes))| {
            let view = safetensors::tensor::TensorView::new(*dtype, shape.to_vec(), bytes);
            (name.to_string(), view.unwrap())
        });
        safetensors::serialize_to_file(views, None, &step.join(name)).unwrap();
    };
    file("model.safetensors", "model/");
    file("optimizer.safetensors", "optimizer/");
    let mut text = serde_json::to_value(state(7)).unwrap();
    text["version"] = 1.into();
    text["optimizer"] = serde_json::json!([]);
    fs::write(step.join("state.json"), text.to_string()).unwrap();

    let store = store::open(folder.path()).unwrap();
    assert_eq!(latest(&*store).unwrap().as_deref(), Some("step-7"));
    let checkpoint = open(folder.path(), 7).unwrap();
    assert_eq!(checkpoint.state(), Some(&state(7)));
    for rank in 0..4 {
        read(&checkpoint, &mesh(2, 2), rank).unwrap();
    }
}

#[test]
fn later_versions_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    save(&*store::open(folder.path()).unwrap(), 1, &mesh(1, 1)).unwrap();
    let path = folder.path().join("step-1/manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("checkpoint 2 ", "checkpoint 3 ", 1)).unwrap();
    let error = open(folder.path(), 1).unwrap_err();
    assert!(
        matches!(error, CheckpointError::Version { found: 3, .. }),
        "{error}"
    );
}

/// Everything there is to a checkpoint, read.
fn check(folder: &Path) -> Result<(), CheckpointError> {
    let checkpoint = open(folder, 1)?;
    checkpoint.verify(|_| ())?;
    read(&checkpoint, &mesh(1, 1), 0)
}

/// Ten thousand of them, in shards and manifest.
#[test]
fn every_flipped_bit_is_found_in_its_file() {
    let folder = tempfile::tempdir().unwrap();
    save(&*store::open(folder.path()).unwrap(), 1, &mesh(2, 1)).unwrap();
    check(folder.path()).unwrap();
    let paths = files(&folder.path().join("step-1"));
    let mut random = 0x2545_f491_4f6c_dd1du64;
    for flip in 0..10_000 {
        // A xorshift: the same flips every time.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let path = &paths[flip % paths.len()];
        let bytes = fs::read(path).unwrap();
        let (at, bit) = (random as usize % bytes.len(), (random >> 60) & 7);
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << bit;
        fs::write(path, &damaged).unwrap();
        let error = check(folder.path()).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        fs::write(path, &bytes).unwrap();
    }
}

#[test]
fn what_is_cut_short_or_swapped_is_found() {
    let folder = tempfile::tempdir().unwrap();
    save(&*store::open(folder.path()).unwrap(), 1, &mesh(2, 1)).unwrap();
    let paths = files(&folder.path().join("step-1"));
    for path in &paths {
        let bytes = fs::read(path).unwrap();
        for length in [0, 1, bytes.len() / 2, bytes.len() - 1] {
            fs::write(path, &bytes[..length]).unwrap();
            let error = check(folder.path()).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        fs::write(path, &bytes).unwrap();
    }
    let (first, second) = (&paths[1], &paths[2]);
    let aside = folder.path().join("aside");
    fs::rename(first, &aside).unwrap();
    fs::rename(second, first).unwrap();
    fs::rename(&aside, second).unwrap();
    let error = check(folder.path()).unwrap_err().to_string();
    assert!(error.contains("safetensors"), "{error}");
}

#[test]
fn names_that_differ_are_told() {
    let folder = tempfile::tempdir().unwrap();
    save(&*store::open(folder.path()).unwrap(), 1, &mesh(1, 1)).unwrap();
    let checkpoint = open(folder.path(), 1).unwrap();
    let error = checkpoint.expect_names("model/", ["model/a", "model/c"].into_iter());
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("missing [model/c]") && error.contains("unexpected [model/b]"),
        "{error}"
    );
}

/// A store of which one operation fails.
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
    fn create(&self, path: &str) -> Result<Box<dyn store::Sink>, CheckpointError> {
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
    fn list(&self, folder: &str) -> Result<Vec<String>, CheckpointError> {
        self.inner.list(folder)
    }
    fn remove(&self, path: &str) -> Result<(), CheckpointError> {
        self.next()?;
        self.inner.remove(path)
    }
    fn remove_folder(&self, folder: &str) -> Result<(), CheckpointError> {
        self.next()?;
        self.inner.remove_folder(folder)
    }
}

/// Wherever a save ends, the one before it or the new one is there, whole.
#[test]
fn a_save_that_fails_leaves_the_one_before() {
    for fails_at in 1..12 {
        let folder = tempfile::tempdir().unwrap();
        let inner = store::open(folder.path()).unwrap();
        save(&*inner, 1, &mesh(2, 1)).unwrap();
        let failing = Failing {
            inner: Arc::clone(&inner),
            left: fails_at.into(),
        };
        let saved = save(&failing, 2, &mesh(2, 1)).and_then(|_| retain(&failing, 2, 1));
        let newest = latest(&*inner).unwrap().unwrap();
        let checkpoint = Checkpoint::open(Arc::clone(&inner), &newest).unwrap();
        checkpoint.verify(|_| ()).unwrap();
        read(&checkpoint, &mesh(1, 1), 0).unwrap();
        assert!(saved.is_err() || newest == "step-2");
        // And the next one works.
        save(&*inner, 3, &mesh(2, 1)).unwrap();
        assert_eq!(latest(&*inner).unwrap().as_deref(), Some("step-3"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever a file holds in place of a header or a manifest, it is refused and nothing panics.
    #[test]
    fn rubbish_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), which in 0usize..2) {
        let folder = tempfile::tempdir().unwrap();
        let step = folder.path().join("step-1");
        fs::create_dir(&step).unwrap();
        match which {
            0 => fs::write(step.join("manifest.json"), &bytes).unwrap(),
            _ => {
                let mut text = serde_json::to_value(state(1)).unwrap();
                text["version"] = 1.into();
                fs::write(step.join("state.json"), text.to_string()).unwrap();
                fs::write(step.join("model.safetensors"), &bytes).unwrap();
                fs::write(step.join("optimizer.safetensors"), &bytes).unwrap();
            }
        }
        prop_assert!(open(folder.path(), 1).is_err());
    }
}
