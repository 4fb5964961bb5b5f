//! Which checkpoints are kept, and how the others go.

use std::fs;
use std::path::{Path, PathBuf};

use crate::folder::{Leftover, leftover_path, step_path, steps};
use crate::{CheckpointError, Result, durable};

/// Deletes checkpoints older than `saved` until `keep` are left with it; 0 keeps all.
pub(crate) fn retain(folder: &Path, saved: u64, keep: usize) -> Result<()> {
    for step in outdated(steps(folder)?, saved, keep) {
        remove(&condemn(folder, step)?)?;
    }
    Ok(())
}

/// Takes a checkpoint's name away, so that half of it never looks like a whole one, and returns
/// what is to be removed. Nothing happens if there is none.
pub(crate) fn condemn(folder: &Path, step: u64) -> Result<PathBuf> {
    let (path, condemned) = (
        step_path(folder, step),
        leftover_path(folder, step, Leftover::Discarded),
    );
    if path.exists() {
        remove(&condemned)?;
        durable::rename(&path, &condemned)?;
    }
    Ok(condemned)
}

/// Deletes a folder if it is there.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match path.exists() {
        true => fs::remove_dir_all(path).map_err(CheckpointError::io(path)),
        false => Ok(()),
    }
}

/// The steps to delete: of those before `saved`, all but the newest `keep - 1`. Later steps belong
/// to another run in the same folder and are not ours to judge.
fn outdated(mut steps: Vec<u64>, saved: u64, keep: usize) -> Vec<u64> {
    if keep == 0 {
        return Vec::new();
    }
    steps.retain(|&step| step < saved);
    steps.sort_unstable_by(|a, b| b.cmp(a));
    steps.into_iter().skip(keep - 1).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn oldest_go_first() {
        assert_eq!(outdated(vec![30, 10, 40, 20], 40, 2), [20, 10]);
        assert_eq!(outdated(vec![30, 10, 40, 20], 40, 0), [0u64; 0]);
        assert_eq!(outdated(vec![10, 200, 300], 10, 1), [0u64; 0]);
    }

    proptest! {
        #[test]
        fn what_was_saved_stays_and_the_newest_with_it(
            steps in proptest::collection::btree_set(0u64..50, 1..20), keep in 1usize..8,
        ) {
            let steps: Vec<u64> = steps.into_iter().collect();
            let saved = steps[steps.len() / 2];
            let gone = outdated(steps.clone(), saved, keep);
            let left: Vec<u64> = steps.iter().copied().filter(|s| !gone.contains(s)).collect();
            prop_assert!(left.contains(&saved));
            prop_assert!(left.iter().filter(|&&s| s <= saved).count() <= keep);
            let newest_gone = gone.iter().max().copied();
            prop_assert!(newest_gone.is_none_or(|g| left.iter().all(|&s| s > g)));
            prop_assert!(gone.is_empty() || left.iter().filter(|&&s| s <= saved).count() == keep);
        }
    }
}
