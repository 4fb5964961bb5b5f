//! What lies in a folder of checkpoints, told by its names.
//!
//! `step-{N}` is the checkpoint of step N if it has a manifest (or is one of version 1), and otherwise
//! what an interrupted save, or an interrupted deletion, has left.

use std::sync::Arc;

use crate::manifest::MANIFEST;
use crate::version_1::STATE_FILE;
use crate::{Checkpoint, Result, Store};

const STEP: &str = "step-";

/// The folder of a step's checkpoint.
pub fn step_folder(step: u64) -> String {
    format!("{STEP}{step}")
}

/// The folder of the newest complete checkpoint; what interrupted saves left is passed over, with a
/// warning that names it.
pub fn latest(store: &dyn Store) -> Result<Option<String>> {
    let (complete, partial) = steps_below(store, u64::MAX)?;
    for step in partial {
        tracing::warn!(
            "{} is left from an interrupted save and is ignored",
            store.describe(&step_folder(step))
        );
    }
    Ok(complete.into_iter().max().map(step_folder))
}

/// The newest checkpoint of which every file is there: for stores that can lose files, where a manifest
/// alone says little.
pub fn latest_whole(store: &Arc<dyn Store>) -> Result<Option<Checkpoint>> {
    let (mut complete, _) = steps_below(&**store, u64::MAX)?;
    complete.sort_unstable();
    for step in complete.into_iter().rev() {
        let folder = step_folder(step);
        let checkpoint = match Checkpoint::open(Arc::clone(store), &folder) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                tracing::warn!("passed over: {error}");
                continue;
            }
        };
        match checkpoint.missing_file()? {
            None => return Ok(Some(checkpoint)),
            Some(file) => {
                let folder = store.describe(&folder);
                tracing::warn!("passed over {folder}: {file} of it is lost");
            }
        }
    }
    Ok(None)
}

/// Steps before `end`: of complete checkpoints, and of what is none.
pub(crate) fn steps_below(store: &dyn Store, end: u64) -> Result<(Vec<u64>, Vec<u64>)> {
    let (mut complete, mut partial) = (Vec::new(), Vec::new());
    let names = store.list("")?;
    for step in names.iter().filter_map(|name| parse(name)) {
        match step {
            step if step >= end => {}
            step if is_complete(store, step)? => complete.push(step),
            step => partial.push(step),
        }
    }
    Ok((complete, partial))
}

fn is_complete(store: &dyn Store, step: u64) -> Result<bool> {
    let folder = step_folder(step);
    for sign in [MANIFEST, STATE_FILE] {
        if store.size(&format!("{folder}/{sign}"))?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The step of a name; `step-007` and `step-+7` were not written by us.
fn parse(name: &str) -> Option<u64> {
    let number = name.strip_prefix(STEP)?;
    let step = number.parse::<u64>().ok()?;
    (step.to_string() == number).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_strictly() {
        assert_eq!(parse("step-0"), Some(0));
        assert_eq!(parse("step-1200"), Some(1200));
        for other in ["step-", "step-007", "step-+7", "step-1.partial", "12", "tb"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    proptest::proptest! {
        #[test]
        fn folders_are_read_back(step: u64) {
            proptest::prop_assert_eq!(parse(&step_folder(step)), Some(step));
        }
    }
}
