//! Arbitrary chunks of a small tensor: it is read only if every element is in exactly one chunk, and then each element
//! is that of its chunk.
#![no_main]

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use trainyard_checkpoint::{Checkpoint, Chunk, Dtype, FileEntry, Manifest, Store, TensorEntry, store};
use trainyard_fuzz::bounded;
use trainyard_mesh::{Region, Slice};

const FILE: &str = "data.safetensors";
const NUM_BYTES: u64 = 256;

static STORE: LazyLock<(TempDir, Arc<dyn Store>)> = LazyLock::new(|| {
    let dir = tempfile::tempdir().expect("create a temporary directory");
    let bytes: Vec<u8> = (0..=u8::MAX).collect();
    std::fs::write(dir.path().join(FILE), bytes).expect("write the file");
    let store = store::open(dir.path()).expect("open the store");
    (dir, store)
});

/// A chunk from eight bytes, often one that fits.
fn chunk(bytes: &[u8], shape: &[usize]) -> Chunk {
    let number = |at: usize, limit: usize| usize::from(bytes[at]) % limit;
    let region = Region {
        offsets: vec![number(0, shape[0] + 1), number(1, shape[1] + 1)],
        lengths: vec![number(2, shape[0] + 1), number(3, shape[1] + 1)],
    };
    let elements = region.num_elements();
    let flat = (bytes[4] % 4 == 0).then(|| {
        let start = number(5, elements + 2);
        start..start + number(6, elements + 2)
    });
    Chunk {
        file: FILE.to_owned(),
        byte_offset: bytes[7].into(),
        slice: Slice { region, flat },
    }
}

/// The value of every element, if each is in exactly one chunk.
fn expected(chunks: &[Chunk], shape: &[usize]) -> Option<Vec<u8>> {
    let mut values = vec![None; shape[0] * shape[1]];
    for chunk in chunks {
        let region = &chunk.slice.region;
        let flat = chunk.slice.flat.clone().unwrap_or(0..region.num_elements());
        for number in flat.clone() {
            let (row, column) = (number / region.lengths[1], number % region.lengths[1]);
            let element = (region.offsets[0] + row) * shape[1] + region.offsets[1] + column;
            let value = chunk.byte_offset as usize + number - flat.start;
            if values[element].replace(value as u8).is_some() {
                return None;
            }
        }
    }
    values.into_iter().collect()
}

fuzz_target!(|bytes: &[u8]| {
    let [rows, columns, rest @ ..] = bytes else {
        return;
    };
    let shape = vec![usize::from(rows % 6), usize::from(columns % 6)];
    let chunks: Vec<Chunk> = rest.chunks_exact(8).map(|bytes| chunk(bytes, &shape)).collect();
    let tensor = TensorEntry {
        dtype: Dtype::U8,
        shape: shape.clone(),
        chunks: chunks.clone(),
    };
    let file = FileEntry {
        num_bytes: NUM_BYTES,
        block_digests: None,
    };
    let manifest = Manifest {
        state: None,
        tensors: BTreeMap::from([("t".to_owned(), tensor)]),
        files: BTreeMap::from([(FILE.to_owned(), file)]),
    };
    bounded(bytes.len(), || {
        let Ok(text) = manifest.encode() else {
            return;
        };
        let opened = Checkpoint::from_manifest_bytes(Arc::clone(&STORE.1), ".", &text);
        // A manifest that does not fit its shapes and files is rejected as a whole.
        let Ok(checkpoint) = opened else {
            return;
        };
        let read = checkpoint.read_tensor("t").ok();
        assert_eq!(read, expected(&chunks, &shape));
    });
});
