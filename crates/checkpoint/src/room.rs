//! Whether storage has room for the checkpoints that a job keeps.
//!
//! A job that keeps `k` checkpoints needs room for one more, because the oldest is deleted only when the newest is
//! complete. If that is missing, every save after the first `k` fails.

use crate::step_dir::steps_below;
use crate::{Result, Store};

/// How many more bytes storage needs for `keep` checkpoints (0 is all) of `num_bytes` and one that is being written,
/// after step `saved` was saved. `None` if there is room, or if the storage does not say how much it has.
pub fn lacking_bytes(
    store: &dyn Store,
    saved: u64,
    num_bytes: u64,
    keep: usize,
) -> Result<Option<u64>> {
    let Some(available) = store.available_bytes()? else {
        return Ok(None);
    };
    let (complete, _) = steps_below(store, saved + 1)?;
    let needed = num_bytes.saturating_mul(num_to_come(complete.len(), keep));
    Ok(needed.checked_sub(available).filter(|lack| *lack > 0))
}

/// How many checkpoints come before the first is deleted. If none is, there must be room for the next one.
fn num_to_come(num_kept: usize, keep: usize) -> u64 {
    match keep {
        0 => 1,
        keep => (keep + 1).saturating_sub(num_kept) as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store;

    #[test]
    fn one_more_checkpoint_than_kept_must_fit() {
        assert_eq!(num_to_come(1, 3), 3);
        assert_eq!(num_to_come(3, 3), 1);
        assert_eq!(num_to_come(5, 3), 0, "of another job, which kept more");
        assert_eq!(num_to_come(7, 0), 1);
    }

    #[test]
    fn the_disk_says_what_it_has() {
        let dir = tempfile::tempdir().unwrap();
        let store = store::open(dir.path()).unwrap();
        let available = store.available_bytes().unwrap().unwrap();
        assert!(available > 0);
        assert_eq!(lacking_bytes(&*store, 1, 1, 2).unwrap(), None);
        let lack = lacking_bytes(&*store, 1, u64::MAX / 8, 2).unwrap();
        assert!(lack.is_some_and(|lack| lack > u64::MAX / 4));
    }
}
