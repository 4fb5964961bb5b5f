//! The keys with which ranks authenticate their save reports to rank 0.
//!
//! Reports go through the workers' store, where any of its clients could write one in the name of a rank, and rank 0
//! commits what reports name. So every rank draws a key, and ranks exchange keys through their process group, which
//! clients of the store do not see.

use trainyard_torch::World;

use crate::agreement::gather;
use crate::error::{Result, TrainError};

type Key = [u8; 32];

/// The numbers of a key, as ranks gather them.
const NUM_WORDS: usize = 4;
const NUM_TAG_BYTES: usize = 32;

/// The key of every rank, for one saver.
#[derive(Clone, Debug)]
pub(super) struct ReportKeys(Vec<Key>);

impl ReportKeys {
    /// Draws the key of this rank and exchanges keys. This is a collective call.
    pub(super) fn exchange(world: &World) -> Result<ReportKeys> {
        let mut own = [0; NUM_WORDS];
        for word in &mut own {
            let drawn = getrandom::u64().map_err(|error| TrainError::Io {
                path: "/dev/urandom".into(),
                source: std::io::Error::other(error),
            })?;
            *word = drawn.cast_signed();
        }
        let words = gather(&world.world_group()?, &own)?;
        let key = |words: &[i64]| {
            let mut key = Key::default();
            for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
            key
        };
        Ok(ReportKeys(words.chunks_exact(NUM_WORDS).map(key).collect()))
    }

    /// A report of a rank with its tag. `name` is where the report is stored, which tells saves apart.
    pub(super) fn seal(&self, rank: usize, name: &str, report: &[u8]) -> Vec<u8> {
        let mut sealed = self.tag(rank, name, report).as_bytes().to_vec();
        sealed.extend_from_slice(report);
        sealed
    }

    /// The report of a rank; `None` if the rank did not write it.
    pub(super) fn open<'a>(&self, rank: usize, name: &str, sealed: &'a [u8]) -> Option<&'a [u8]> {
        let (tag, report) = sealed.split_first_chunk::<NUM_TAG_BYTES>()?;
        // Hashes compare in constant time.
        (self.tag(rank, name, report) == *tag).then_some(report)
    }

    fn tag(&self, rank: usize, name: &str, report: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0[rank]);
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hasher.update(report);
        hasher.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_rank_itself_can_write_its_report() {
        let keys = ReportKeys(vec![[1; 32], [2; 32]]);
        let sealed = keys.seal(1, "5/1", b"report");
        assert_eq!(keys.open(1, "5/1", &sealed), Some(&b"report"[..]));
        assert_eq!(keys.open(0, "5/1", &sealed), None);
        assert_eq!(keys.open(1, "6/1", &sealed), None, "of another save");
        let foreign = ReportKeys(vec![[1; 32], [3; 32]]);
        assert_eq!(foreign.open(1, "5/1", &sealed), None);
        for position in 0..sealed.len() {
            let mut forged = sealed.clone();
            forged[position] ^= 1;
            assert_eq!(keys.open(1, "5/1", &forged), None);
        }
        assert_eq!(keys.open(1, "5/1", b"report"), None);
    }
}
