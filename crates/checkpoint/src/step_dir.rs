//! The step directories of a job's checkpoint store.
//!
//! `step-{N}` is the checkpoint of step N if it has a manifest. Otherwise it is the remainder of an
//! interrupted save or of an interrupted deletion.

use std::sync::Arc;

use crate::manifest::MANIFEST;
use crate::{Checkpoint, Result, Store};

const STEP: &str = "step-";
/// The state file of format version 1, which had no manifest. A directory with it counts as a complete
/// checkpoint, so that loading it reports the version instead of a silent start from step 0.
pub(crate) const VERSION_1_STATE: &str = "state.json";

/// The directory name of a step's checkpoint.
pub fn step_dir(step: u64) -> String {
    format!("{STEP}{step}")
}

/// The directory of the newest complete checkpoint. Logs a warning for every remainder of an interrupted
/// save that it skips.
pub fn latest(store: &dyn Store) -> Result<Option<String>> {
    Ok(latest_below(store, u64::MAX)?.map(step_dir))
}

/// The step of the newest complete checkpoint before step `end`; see [`latest`].
pub fn latest_below(store: &dyn Store, end: u64) -> Result<Option<u64>> {
    let (complete, partial) = steps_below(store, end)?;
    for step in partial {
        tracing::warn!(
            "{} is left from an interrupted save and is ignored",
            store.describe(&step_dir(step))
        );
    }
    Ok(complete.into_iter().max())
}

/// The newest checkpoint of which no file is missing. For stores that can lose files, such as the memory
/// of peers, where a manifest does not prove that the other files still exist.
pub fn latest_complete(store: &Arc<dyn Store>) -> Result<Option<Checkpoint>> {
    latest_complete_below(store, u64::MAX)
}

/// As [`latest_complete`], before step `end`.
pub fn latest_complete_below(store: &Arc<dyn Store>, end: u64) -> Result<Option<Checkpoint>> {
    let (mut complete, _) = steps_below(&**store, end)?;
    complete.sort_unstable();
    for step in complete.into_iter().rev() {
        let dir = step_dir(step);
        let checkpoint = match Checkpoint::open(Arc::clone(store), &dir) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                tracing::warn!("skipped: {error}");
                continue;
            }
        };
        match checkpoint.missing_file()? {
            None => return Ok(Some(checkpoint)),
            Some(file) => {
                let dir = store.describe(&dir);
                tracing::warn!("skipped {dir}: its file {file} is missing");
            }
        }
    }
    Ok(None)
}

/// The steps before `end`: those of complete checkpoints, and those of incomplete directories.
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
    let dir = step_dir(step);
    for marker in [MANIFEST, VERSION_1_STATE] {
        if store.size(&format!("{dir}/{marker}"))?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The step of a directory name. Rejects names that [`step_dir`] does not produce, such as `step-007`.
fn parse(name: &str) -> Option<u64> {
    let number = name.strip_prefix(STEP)?;
    let step = number.parse::<u64>().ok()?;
    (step.to_string() == number).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_canonical_names_parse() {
        assert_eq!(parse("step-0"), Some(0));
        assert_eq!(parse("step-1200"), Some(1200));
        for other in ["step-", "step-007", "step-+7", "step-1.partial", "12", "tb"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    proptest::proptest! {
        #[test]
        fn every_step_round_trips(step: u64) {
            proptest::prop_assert_eq!(parse(&step_dir(step)), Some(step));
        }
    }
}
